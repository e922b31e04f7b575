"""What holds for every fused kernel alike: values at odd sizes, graphs, streams, devices, modes, large tensors."""

import contextlib
import warnings
from dataclasses import replace

import pytest
import torch

import calls
import dsa_ops
import fused
import inputs
from dsa_ops import dispatch
from inputs import ALL, DIFFERENTIABLE, Case

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
SMALL = Case(T=37, S=150, H=5, D=576, Dv=512, Hi=8, Di=128, K=77, dtype=BF16)
# head counts and widths that other training backends decline, each once
SHAPES = {
    "few_heads": replace(SMALL, H=4, Hi=4, Di=64, K=1),
    "24_heads": replace(SMALL, H=24, Hi=16, D=512, Dv=512, K=100),
    "96_heads": replace(SMALL, H=96, Hi=32, T=9, K=65),
    "129_heads": replace(SMALL, H=129, Hi=64, T=3, S=70),
    "one": replace(SMALL, T=1, S=1, H=1, K=1),
    "more_slots_than_keys": replace(SMALL, S=5, K=200),
    "narrow": replace(SMALL, D=160, Dv=128, Di=64, H=16),
    "no_options": replace(SMALL, optional=False, relu=False, wide=False, expanded_keys=True, D=160, Dv=128),
    "all_rows_empty": replace(SMALL, empty=True),
    "transposed": replace(SMALL, layout="transposed", T=11),
    "sliced": replace(SMALL, layout="sliced", T=11),
    "expanded": replace(SMALL, layout="expanded", T=11),
    "heads_elsewhere": replace(SMALL, total_heads=64),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ALL)
def test_values(name, shape, poisoned):
    case = SHAPES[shape]
    args = inputs.arguments(name, case, device="cuda")
    with fused.fused():
        got = calls.run(name, args)
    want = calls.reference(name, args)
    with fused.unfused():
        other = calls.run(name, args)
    for n in got:
        assert got[n].dtype == other[n].dtype and got[n].stride() == other[n].stride()
        if n == "indices":
            # the oracle may order scores that float32 cannot tell apart otherwise
            same = (got[n].cpu() == want[n]).float().mean() if want[n].numel() else 1
            assert same > 0.99, f"indices agree in {same:.3f} of the slots"
        elif n != "scores" or name != "indexer_topk":
            calls.assert_near(got[n], want[n], 3e-5 if got[n].dtype == torch.float32 and n in OUTPUTS else 3e-2, n)


OUTPUTS = ("scores", "lse", "target", "kl", "loss")


@pytest.mark.parametrize("name", ALL)
def test_no_rows_and_no_keys(name):
    for case in (replace(SMALL, T=0), replace(SMALL, S=0), replace(SMALL, T=0, S=0)):
        args = inputs.arguments(name, case, device="cuda")
        with fused.fused():
            calls.assert_all_near(calls.run(name, args), calls.reference(name, args), 1e-6)


@pytest.mark.parametrize("name", ALL)
def test_memory_around_the_inputs_is_never_read(name):
    args = inputs.arguments(name, SMALL, device="cuda")
    guarded = {n: fused.guarded(x) if isinstance(x, torch.Tensor) and x.dim() else x for n, x in args.items()}
    with fused.fused(), deterministic():
        calls.assert_all_equal(calls.run(name, guarded), calls.run(name, args))


@contextlib.contextmanager
def deterministic():
    """So that gradients that sum over queries can be compared bit for bit."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("name", ALL)
def test_deterministic_mode_gives_the_same_bits(name):
    args = inputs.arguments(name, replace(SMALL, T=300), device="cuda")
    with fused.fused(), deterministic():
        first = calls.run(name, args)
        for _ in range(3):
            calls.assert_all_equal(calls.run(name, args), first)


@pytest.mark.parametrize("name", ALL)
def test_reproducible_results_have_the_same_bits_by_default(name):
    args = inputs.arguments(name, replace(SMALL, T=300), device="cuda")
    sums_over_queries = {"k", "kv", "sink", "index_k"}
    with fused.fused():
        first = calls.run(name, args)
        for _ in range(3):
            again = calls.run(name, args)
            for n in set(first) - (sums_over_queries if name not in inputs.OPS else set()):
                assert torch.equal(calls.bits(again[n]), calls.bits(first[n])), n


@pytest.mark.parametrize("name", ALL)
def test_a_graph_replays_with_new_values(name):
    args = inputs.arguments(name, SMALL, device="cuda", grad=False)
    other = inputs.arguments(name, SMALL, device="cuda", seed=5)
    with fused.fused(), deterministic():
        want, want_other = calls.run(name, args), calls.run(name, other)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = calls.run(name, args)
        graph.replay()
        calls.assert_all_equal(got, want)
        for n, x in args.items():
            if isinstance(x, torch.Tensor):
                x.copy_(other[n])
        graph.replay()
        calls.assert_all_equal(got, want_other)


@pytest.mark.parametrize("name", ALL)
def test_runs_on_the_current_stream(name):
    """The inputs are still being written on that stream when the op is called."""
    args = inputs.arguments(name, SMALL, device="cuda")
    with fused.fused(), deterministic():
        want = calls.run(name, args)
        late = {n: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x for n, x in args.items()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            for n, x in late.items():
                if isinstance(x, torch.Tensor):
                    x.copy_(args[n])
            got = calls.run(name, late)
        stream.synchronize()
        calls.assert_all_equal(got, want)


@pytest.mark.multigpu
@pytest.mark.parametrize("name", ALL)
def test_a_device_that_is_not_the_current_one(name):
    args = inputs.arguments(name, SMALL, device="cuda:0")
    moved = {n: x.to("cuda:1") if isinstance(x, torch.Tensor) else x for n, x in args.items()}
    with fused.fused(), deterministic():
        want = calls.run(name, args)
        got = calls.run(name, moved)
    assert torch.cuda.current_device() == 0
    assert all(x.device == torch.device("cuda:1") for x in got.values())
    calls.assert_all_equal({n: x.to("cuda:0") for n, x in got.items()}, want)


@pytest.mark.parametrize("name", ALL)
def test_the_host_never_waits(name):
    args = inputs.arguments(name, SMALL, device="cuda")
    with fused.fused():
        calls.run(name, args)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            calls.run(name, args)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ALL)
def test_explain_and_no_warning(name):
    args = inputs.arguments(name, SMALL, device="cuda")
    if name in inputs.OPS:
        positional, keywords = calls.public_arguments(name, args)
        found = dsa_ops.explain(name, *positional, **keywords)
    else:
        found = dsa_ops.explain(name, *args.values())
    assert (found.backend, found.kernel) == ("tilelang", dispatch.KERNELS[name][0].name) and not found.refusals
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calls.run(name, args)


@pytest.mark.parametrize("name", ALL)
def test_refusals_name_the_argument_and_what_is_served(name):
    args = inputs.arguments(name, SMALL, device="cuda", dtype=torch.float64)
    with (
        fused.fused(),
        pytest.raises(RuntimeError, match=r"cannot serve this call: \w+: \w+ is float64, the kernel takes"),
    ):
        calls.run(name, args)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("forward", ["tilelang", "unfused"])
def test_forward_and_backward_of_different_backends_combine(name, forward):
    args = inputs.arguments(name, SMALL, device="cuda", grad=True)
    with dsa_ops.backend(forward):
        outputs = calls.run(name, args)
    incoming = calls.incoming(name, outputs)
    with dsa_ops.backend("unfused" if forward == "tilelang" else "tilelang"):
        got = calls.gradients(name, args, incoming, outputs)
    if name == "indexer_topk":  # by the selection that was made
        args = {"q": args["q"], "k": args["k"], "weights": args["weights"], "indices": outputs["indices"]}
        args, name = {**args, "relu": True}, "indexer_scores"
    want = calls.reference_gradients(name, args, incoming)
    for n in got:
        calls.assert_near(got[n], want[n], 3e-2, n)


def test_a_compiled_step_is_the_eager_step():
    case = replace(SMALL, T=64, S=64, Hi=16, H=16)
    index = inputs.arguments("indexer_scores", case, device="cuda", grad=True)
    attention = inputs.arguments("sparse_mla", case, device="cuda", grad=True)

    def step(iq, ik, weights, q, kv):
        ids, scores = dsa_ops.indexer_topk(iq, ik, weights, topk=40)
        out, lse = dsa_ops.sparse_mla(q, kv, ids, 0.05, 512)
        loss = dsa_ops.indexer_loss(q, kv, lse, ids, scores, 0.05)
        return out, loss

    leaves = [index["q"], index["k"], index["weights"], attention["q"], attention["kv"]]

    def run(function):
        out, loss = function(*leaves)
        return [out, loss, *torch.autograd.grad(out.float().square().mean() + loss, leaves)]

    with fused.fused(), deterministic():
        want = run(step)
        got = run(torch.compile(step, fullgraph=True))
    for mine, theirs in zip(got, want, strict=True):
        calls.assert_near(mine, theirs, 1e-6)


def test_indexer_with_more_than_2_to_the_31_elements(gpu_memory):
    """T * Hi * Di = 2.2e9, and T * S = 2.4e9, whose scores are never there at once."""
    gpu_memory(60)
    T, S, Hi, Di, K = 270_000, 9000, 64, 128, 16
    q = torch.randn(T, Hi, Di, device="cuda", dtype=BF16)
    k = torch.randn(S, Di, device="cuda", dtype=BF16)
    weights = torch.randn(T, Hi, device="cuda")
    ends = torch.full((T,), 0, device="cuda", dtype=torch.int32)
    ends[:100], ends[-100:] = S, S
    starts = torch.zeros_like(ends)
    rows = torch.cat([torch.arange(100), torch.arange(T - 100, T)]).cuda()
    assert q.numel() > 2**31
    with fused.fused():
        ids, scores = torch.ops.dsa.indexer_topk(q, k, weights, starts, ends, K)
        few = torch.ops.dsa.indexer_topk(q[rows], k, weights[rows], starts[rows], ends[rows], K)
        assert torch.equal(ids[rows], few[0]) and torch.equal(scores[rows], few[1])
        assert (ids[100:-100] == -1).all()
        again = torch.ops.dsa.indexer_scores(q, k, weights, ids)
        calls.assert_near(again, scores, 1e-5)
        grad = torch.randn_like(scores)
        got = torch.ops.dsa.indexer_scores_backward(grad, q, k, weights, ids)
        want = torch.ops.dsa.indexer_scores_backward(grad[rows], q[rows], k, weights[rows], ids[rows])
        assert torch.equal(got[0][rows], want[0]) and torch.equal(got[2][rows], want[2])
        assert fused.error(got[1], want[1]) < 1e-2
