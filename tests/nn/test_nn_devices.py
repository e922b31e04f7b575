"""The layer on every device and dtype against the float64 oracle, and what it costs on CUDA."""

import pytest
import torch

import layer_oracle as oracle
from dsa_ops.nn import dense, set_mode
from dsa_ops.nn.attention import MODES
from layers import LAYOUTS, gradients, hidden, layer, split, state

# relative to the size of the result; bfloat16 rounds weights, projections and probabilities to 8 bits each
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.05}


def on(device, *tensors):
    return [None if t is None else t.to(device) for t in tensors]


@pytest.mark.parametrize("tiles", ["one tile", "many tiles"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("mode", "sink"), [("dense", False), ("dense", True), ("warmup", False)])
def test_dense_stages(mode, sink, dtype, layout, tiles, device, monkeypatch):
    """Without a sink, rows that see nothing are what some of torch's kernels get wrong."""
    if tiles == "many tiles":
        for budgets in (dense._MASK_BYTES, dense._LOGIT_BYTES):
            monkeypatch.setitem(budgets, torch.device(device).type, 4000)
        monkeypatch.setitem(dense._MASKS_KEPT, torch.device(device).type, 0)
    module, x = layer(mode, sink=sink, dtype=dtype), hidden(2, 37, dtype=dtype).detach()
    starts, ends, visible, positions = LAYOUTS[layout](2, 37)
    params, wide = state(module), x.double().clone().requires_grad_()
    module, x = module.to(device), x.to(device).requires_grad_()
    got = module(x, **dict(zip(("starts", "ends"), on(device, starts, ends), strict=True)))
    want, target = oracle.attention(params, module.config, wide, positions, visible)
    tolerance = TOLERANCE[dtype]
    assert (got.out.cpu().double() - want).norm() <= tolerance * want.norm()
    assert torch.all(got.out.cpu()[~visible.any(-1)] == 0)
    if mode == "warmup":
        kl = oracle.kl(target, oracle.index_scores(params, module.config, wide, positions), visible).mean()
        assert (got.kl.cpu().double() - kl).abs() <= tolerance * kl.abs().clamp(min=1)
    got.out.float().square().sum().backward()
    names = [name for name in params if "indexer." not in name]
    expected = torch.autograd.grad(want.square().sum(), [params[name] for name in names] + [wide])
    grads = gradients(module)
    for name, want in zip([*names, "x"], expected, strict=True):
        grad = x.grad if name == "x" else grads[name]
        assert (grad.cpu().double() - want).norm() <= 4 * tolerance * want.norm(), name
    if mode == "warmup":
        assert all(grad.isfinite().all() for grad in split(grads)[0].values())


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["causal", "packed"])
@pytest.mark.parametrize("mode", MODES)
def test_no_host_sync(mode, layout):
    """Nothing in forward or backward waits for the device, whatever the bounds say."""
    module = set_mode(layer("dense", sink=True, dtype=torch.bfloat16).cuda(), mode)
    x = torch.randn(512, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ids = torch.arange(512, dtype=torch.int32, device="cuda")
    bounds = {"starts": ids // 100 * 100, "ends": ids + 1} if layout == "packed" else {}
    mask = ids % 3 > 0
    module(x, row_mask=mask, **bounds).out.sum().backward()  # once for what torch sets up on first use
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(x, row_mask=mask, **bounds).out.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("bounds", [False, True], ids=["causal", "bounds"])
def test_dense_memory_on_cuda(bounds):
    """16384 tokens: a mask of all rows times all keys takes 268 MB as bool, logits of 8 heads 4.3 GB in bfloat16."""
    rows, heads = 16384, 8
    q, k, v = (
        torch.randn(1, rows, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    ids = torch.arange(rows, dtype=torch.int32, device="cuda")[None]
    limits = {"starts": ids // 5000 * 5000, "ends": ids + 1} if bounds else {}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    dense.dense_attention(q, k, v, softmax_scale=0.1, **limits).sum().backward()
    # gradients and their like are 16.8 MB each
    assert torch.cuda.max_memory_allocated() - before < 16 * q.nbytes + (256 << 20)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    dense.visible_lse(q, k, softmax_scale=0.1, **limits)
    assert torch.cuda.max_memory_allocated() - before < 6 * q.nbytes + (512 << 20)
