"""CUDA graphs, streams, several devices, alignment: what other implementations got wrong."""

import pytest
import torch

import calls
import dsa_ops
import inputs
import steps
from inputs import DIFFERENTIABLE, OPS

CASE = dict(T=40, S=90, H=4, D=32, Dv=16, Hi=3, Di=16, K=24)


def shifted(x):
    """The same values one element into a larger buffer: addresses as odd as the dtype allows."""
    buffer = x.new_empty(x.numel() + 1)
    return buffer[1:].view(x.shape).copy_(x.detach()).requires_grad_(x.requires_grad)


@pytest.mark.parametrize("name", OPS)
def test_slices_that_begin_at_any_element(name, device):
    """NVIDIA/cudnn-frontend#354: a slice of an int32 tensor is aligned to 4 bytes, and a vector load wanted 16."""
    for dtype in (torch.float32, torch.bfloat16):
        args = steps.arguments(name, device=device, dtype=dtype, **CASE)
        incoming = None
        if name in DIFFERENTIABLE:
            incoming = calls.incoming(name, calls.run(name, args))
        want = steps.run(name, args, incoming)
        odd = {n: shifted(x) if isinstance(x, torch.Tensor) else x for n, x in args.items()}
        assert all(x.storage_offset() == 1 for x in odd.values() if isinstance(x, torch.Tensor))
        got = steps.run(name, odd, incoming)
        for n in got:
            if n in OPS[name].outputs and device == "cpu":
                assert torch.equal(calls.bits(got[n]), calls.bits(want[n])), n
            else:
                calls.assert_near(got[n], want[n], what=n)


@pytest.mark.parametrize("name", OPS)
def test_dimensions_of_size_one_with_odd_strides(name, device):
    """NVIDIA/cudnn-frontend#1154: `is_contiguous()` is true for any stride of a dimension of size 1, and a kernel that
    reads strides goes astray."""
    args = steps.arguments(name, device=device, T=1, S=1, H=1, Hi=1, K=1, dtype=torch.float64)
    odd = {}
    for n, x in args.items():
        if isinstance(x, torch.Tensor) and x.dim():
            strides = [s if size > 1 else 12345 for size, s in zip(x.shape, x.stride(), strict=True)]
            odd[n] = x.detach().as_strided(x.shape, strides).requires_grad_(x.requires_grad)
            assert odd[n].is_contiguous() and odd[n].stride() != x.stride()
    steps.check(name, {**args, **odd})


def loss_and_gradients(args):
    """A layer's whole step, from the arguments of three ops."""
    index, mla = args
    indices, scores = dsa_ops.indexer_topk(
        index["q"], index["k"], index["weights"], starts=index["starts"], ends=index["ends"], topk=CASE["K"]
    )
    out, lse = dsa_ops.sparse_mla(mla["q"], mla["kv"], indices, 0.3, CASE["Dv"], sink=mla["sink"])
    mask = index["starts"] < index["ends"]
    loss = dsa_ops.indexer_loss(mla["q"], mla["kv"], lse, indices, scores, 0.3, row_mask=mask)
    total = out.float().square().sum() + loss
    leaves = [index["q"], index["k"], index["weights"], mla["q"], mla["kv"], mla["sink"]]
    return (indices, out.detach(), loss.detach(), *torch.autograd.grad(total, leaves))


def layer_inputs(dtype=torch.bfloat16, device="cuda", **changes):
    return [steps.arguments(n, device=device, dtype=dtype, **(CASE | changes)) for n in ("indexer_topk", "sparse_mla")]


def assert_near(got, want, tolerance=3e-2):
    for a, b in zip(got, want, strict=True):
        calls.assert_near(a, b, 0 if a.dtype == torch.int32 else tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_no_host_sync(name):
    """NVIDIA/cudnn-frontend#356, flashinfer-ai/flashinfer#4362: .item() on a gradient, .tolist() of lengths, a boolean
    mask as index."""
    args = steps.arguments(name, device="cuda", **CASE)
    incoming = None
    if name in DIFFERENTIABLE:
        incoming = calls.incoming(name, calls.run(name, args))
    steps.run(name, args, incoming)  # a warm-up: libraries may wait once
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps.run(name, args, incoming)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_whole_step_is_captured_and_replayed_with_other_values():
    """NVIDIA/cudnn-frontend#354, sgl-project/sglang#29413, vllm-project/vllm#57388: capture fails on a hidden sync, or
    a replay reads scratch memory that eager calls have used since."""
    args = layer_inputs()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            loss_and_gradients(args)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = loss_and_gradients(args)
    for seed in (1, 2):
        others = layer_inputs(seed=seed)
        with torch.no_grad():
            for mine, other in zip(args, others, strict=True):
                for n, x in mine.items():
                    if isinstance(x, torch.Tensor):
                        x.copy_(other[n])
        bigger = layer_inputs(T=300, S=700)  # between the copies and the replay: eager calls of other sizes
        loss_and_gradients(bigger)
        graph.replay()
        loss_and_gradients(bigger)
        torch.cuda.synchronize()
        assert_near(captured, loss_and_gradients(others))


@pytest.mark.gpu
def test_two_streams_at_once():
    """vllm-project/vllm#57388: one scratch buffer for a device, used from two streams."""
    many = [layer_inputs(torch.float32, seed=seed, T=400, S=600) for seed in range(2)]
    want = [loss_and_gradients(args) for args in many]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in many], [None, None]
    for _ in range(5):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i] = loss_and_gradients(many[i])
    torch.cuda.synchronize()
    for got, expected in zip(found, want, strict=True):
        assert_near(got, expected, 1e-4)


@pytest.mark.gpu
def test_the_current_stream_is_used():
    """deepseek-ai/FlashMLA#158: work put on the default stream does not wait for what the current one still does."""
    args = layer_inputs(torch.float32)
    want = loss_and_gradients(args)
    late = [{n: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x for n, x in a.items()} for a in args]
    late = [
        {n: x.requires_grad_(a[n].requires_grad) if isinstance(x, torch.Tensor) else x for n, x in z.items()}
        for z, a in zip(late, args, strict=True)
    ]
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(20):
            busy = (busy @ busy).clamp_(-1, 1)  # the copies below come late
        with torch.no_grad():
            for a, z in zip(args, late, strict=True):
                for n, x in a.items():
                    if isinstance(x, torch.Tensor):
                        z[n].copy_(x)
        got = loss_and_gradients(late)
        torch.cuda.current_stream().synchronize()
    assert_near(got, want, 1e-4)


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.parametrize("current", [0, 1])
def test_tensors_on_another_device_than_the_current_one(current):
    """deepseek-ai/FlashMLA#158, Dao-AILab/flash-attention#2356, Dao-AILab/flash-attention#1782: without a guard a
    launch went to device 0, and the result was zero without an error."""
    before = torch.cuda.current_device()
    torch.cuda.set_device(current)
    try:
        want = loss_and_gradients(layer_inputs(device="cpu", dtype=torch.float32))
        for device in ("cuda:0", "cuda:1"):
            got = loss_and_gradients(layer_inputs(device=device, dtype=torch.float32))
            assert torch.cuda.current_device() == current
            assert all(x.device == torch.device(device) for x in got)
            assert_near(got, want, 1e-4)
    finally:
        torch.cuda.set_device(before)


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.parametrize("name", inputs.ALL)
def test_tensors_on_two_devices_are_refused(name):
    """deepseek-ai/TileKernels#30: pointers of one device went to a kernel on another."""
    args = inputs.arguments(name, device="cuda:0")
    for n, x in args.items():
        if isinstance(x, torch.Tensor):
            with pytest.raises(ValueError, match=rf"^{name}: .* must be on cuda:"):
                calls.run(name, {**args, n: x.to("cuda:1")})
