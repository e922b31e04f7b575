"""The fused index scores and their gradients against float64 and the unfused ops, and at the edges of the contract."""

import pytest
import torch

import dsa_ops
import fused
import inputs

pytestmark = pytest.mark.gpu

# Hi, Di, relu: every number of heads, each compiled once for the whole file.
VARIANTS = ((64, 128, True), (32, 128, True), (16, 64, False), (8, 128, False), (4, 64, True))
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = (
    (1, 1, 1),
    (3, 70, 5),
    (130, 257, 63),
    (64, 64, 64),
    (33, 40, 65),
    (200, 3000, 129),
    (70, 5000, 1000),
    (257, 4097, 2048),
)
ROWS_AT_ONCE = 64  # of the references


def draw(T, S, K, Hi, Di, *, weights=torch.float32, empty=0.2, grad=torch.float32):
    """Inputs by name, with ids of every kind: repeats, -1 and ids past the last key anywhere, rows without a key."""
    make = dict(device="cuda")
    ids = torch.randint(0, S, (T, K), dtype=torch.int32, **make)
    outside = torch.tensor([-1, -7, S, S + 1, 2**31 - 1, -(2**31)], dtype=torch.int32, **make)
    none = torch.rand(T, K, **make) < empty
    ids[none] = outside[torch.randint(0, len(outside), (int(none.sum()),), **make)]
    tail = torch.randint(0, K + 1, (T,), **make)
    ids[(torch.arange(K, **make) >= tail[:, None]) & (torch.rand(T, 1, **make) < 0.5)] = -1
    return dict(
        grad=torch.randn(T, K, **make).to(grad),
        q=torch.randn(T, Hi, Di, **make).bfloat16(),
        k=torch.randn(S, Di, **make).bfloat16(),
        weights=torch.randn(T, Hi, **make).to(weights),
        ids=ids,
    )


def valid_slots(ids, S):
    return (ids >= 0) & (ids < S)


def reference(grad, q, k, weights, ids, relu, *, rounded=False):
    """Scores and gradients in float64; `rounded` as a kernel may round: ds before its products, results to bfloat16."""
    S = k.shape[0]
    parts, grad_k = [], torch.zeros(k.shape, dtype=torch.float64, device=k.device)
    for rows in torch.arange(ids.shape[0], device="cpu").split(ROWS_AT_ONCE):
        at = slice(int(rows[0]), int(rows[-1]) + 1)
        valid = valid_slots(ids[at], S)
        some = valid.any(1)
        keys = k[ids[at].clamp(0, S - 1).long()].double().masked_fill(~valid[..., None], 0)
        qd = q[at].double().masked_fill(~some[:, None, None], 0)
        wd = weights[at].double().masked_fill(~some[:, None], 0)
        g = grad[at].double().masked_fill(~valid, 0)
        s = torch.einsum("thd,tkd->thk", qd, keys)
        act = s.relu() if relu else s
        ds = g[:, None] * wd[..., None]
        if relu:
            ds = ds.masked_fill(s <= 0, 0)
        ds = ds.masked_fill(~valid[:, None], 0)
        if rounded:
            ds = ds.bfloat16().double()
        grad_k.index_add_(0, ids[at][valid].long(), torch.einsum("thk,thd->tkd", ds, qd)[valid])
        scores = torch.einsum("th,thk->tk", wd, act).masked_fill(~valid, -torch.inf)
        parts.append((scores, torch.einsum("thk,tkd->thd", ds, keys), torch.einsum("tk,thk->th", g, act)))
    scores, grad_q, grad_w = (torch.cat(p) for p in zip(*parts, strict=True))
    if rounded:
        grad_q, grad_k = grad_q.bfloat16(), grad_k.bfloat16()
        grad_w = grad_w.to(weights.dtype)
    return dict(scores=scores, q=grad_q, k=grad_k, weights=grad_w)


def dirty_memory():
    """What torch hands out next held NaN."""
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26):
        torch.full((size,), torch.nan, device="cuda")


def run(case, relu, *, backend=fused.fused, needs=(True, True, True)):
    """Scores and gradients of the ops called with these very tensors."""
    dirty_memory()
    with backend():
        scores = torch.ops.dsa.indexer_scores(case["q"], case["k"], case["weights"], case["ids"], relu)
        grads = torch.ops.dsa.indexer_scores_backward(
            case["grad"], case["q"], case["k"], case["weights"], case["ids"], relu, *needs
        )
    return dict(zip(("scores", "q", "k", "weights"), (scores, *grads), strict=True))


def check(got, case, relu, names=("q", "k", "weights")):
    want = reference(**case, relu=relu)
    baseline = reference(**case, relu=relu, rounded=True)
    fused.assert_close(got["scores"], want["scores"], "scores")
    for name in names:
        assert got[name].dtype == case[name].dtype
        fused.assert_as_good(got[name], baseline[name], want[name], f"grad_{name}")


def pick(values):
    return values[int(torch.randint(0, len(values), ()))]


@pytest.mark.parametrize("size", SIZES, ids=lambda s: "T{}-S{}-K{}".format(*s))
@pytest.mark.parametrize("seed", range(2))
def test_is_right_for_a_drawn_case(size, seed):
    """Amid poison, with weights and incoming gradients of several dtypes; the unfused ops are held to the same."""
    heads, width, relu = pick(VARIANTS)
    case = draw(*size, heads, width, weights=pick(FLOATS[:2]), grad=pick(FLOATS))
    case = {name: fused.guarded(x) for name, x in case.items()}
    check(run(case, relu), case, relu)
    check(run(case, relu, backend=fused.unfused), case, relu)


@pytest.mark.parametrize("heads, width, relu", VARIANTS)
def test_is_right_for_full_rows(heads, width, relu):
    case = draw(300, 4000, 2048, heads, width, empty=0.0)
    check(run(case, relu), case, relu)


def test_empty_slots_have_no_effect():
    """NaN in keys that no slot names, in the gradients of empty slots, and in all of a row without a key."""
    case = draw(90, 1000, 200, 64, 128)
    S = case["k"].shape[0]
    case["ids"][valid_slots(case["ids"], S) & (case["ids"] % 7 == 0)] = -1
    case["ids"][5:9] = -1
    case["k"][::7] = torch.nan
    valid = valid_slots(case["ids"], S)
    case["grad"][~valid] = torch.nan
    case["q"][5:9], case["weights"][5:9] = torch.nan, torch.inf
    clean = {**case, "grad": case["grad"].nan_to_num(0), "k": case["k"].nan_to_num(0)}
    got = run(case, True)
    check(got, clean, True)
    assert torch.isinf(got["scores"][5:9]).all()
    for name in ("q", "weights"):
        assert not got[name][5:9].any()
    assert not got["k"][::7].any()
    other = run(clean, True)
    for name in ("scores", "q", "weights"):
        assert torch.equal(got[name], other[name])


@pytest.mark.parametrize("heads, width, relu", VARIANTS[:3])
def test_nan_and_infinity_of_keys_in_use_surface(heads, width, relu):
    case = draw(20, 50, 30, heads, width, empty=0.0)
    case["k"][3], case["k"][4] = torch.nan, torch.inf
    got, want = run(case, relu), run(case, relu, backend=fused.unfused)
    for name in ("scores", "q", "k", "weights"):
        assert torch.equal(got[name].isfinite(), want[name].isfinite()), name


@pytest.mark.parametrize("heads", [4, 8, 64])
def test_heads_that_fill_up_a_product_add_nothing_to_an_infinite_key(heads):
    case = draw(20, 50, 30, heads, 64, empty=0.0)
    case["k"][3, 0], case["q"][:, :, 0] = torch.inf, -1.0
    got = run(case, True)["scores"]  # relu(-inf) = 0 for every head
    assert torch.equal(got[case["ids"] == 3], torch.zeros_like(got[case["ids"] == 3]))


def test_relu_passes_no_gradient_at_zero():
    for heads, width, relu in VARIANTS:
        case = draw(4, 10, 8, heads, width, empty=0.0)
        case["q"].zero_()
        got = run(case, relu)
        assert bool(got["q"].any()) == (not relu)
        assert not got["k"].any() and not got["weights"].any()


@pytest.mark.parametrize("needed", [("q",), ("k",), ("weights",), ()], ids="+".join)
def test_gradients_that_nobody_needs(needed):
    case = draw(40, 90, 70, 16, 64)
    names = ("q", "k", "weights")
    got = run(case, False, needs=[n in needed for n in names])
    check(got, case, False, needed)
    assert all(got[n].shape == (0,) and got[n].dtype == case[n].dtype for n in names if n not in needed)


def test_no_rows_and_no_keys():
    for T, S in ((0, 5), (4, 0), (0, 0)):
        case = draw(4, 5, 3, 64, 128)
        case = {n: x[:S] if n == "k" else x[:T] for n, x in case.items()}
        got = run(case, True)
        assert got["scores"].shape == (T, 3) and (got["scores"] == -torch.inf).all()
        assert all(got[n].shape == case[n].shape and not got[n].any() for n in ("q", "k", "weights"))


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
def test_strided_inputs(layout):
    case = draw(50, 300, 77, 32, 128)
    strided = {name: inputs.relayout(x, layout) for name, x in case.items()}
    case = {name: x.contiguous() for name, x in strided.items()}
    check(run(strided, True), case, True)


def test_a_row_does_not_depend_on_the_others():
    """Nor on what was launched with it, nor on the run; and everything but the gradient of keys has its bits."""
    case = draw(150, 2000, 500, 64, 128)
    whole, again = run(case, True), run(case, True)
    part = run({n: x if n == "k" else x[40:90] for n, x in case.items()}, True)
    for name in ("scores", "q", "weights"):
        assert torch.equal(whole[name], again[name]), name
        assert torch.equal(whole[name][40:90], part[name]), name


@pytest.mark.parametrize("heads, width, relu", [VARIANTS[0], VARIANTS[2]])
def test_deterministic_mode(heads, width, relu, poisoned, monkeypatch):
    """The gradient of keys has its bits too, whatever the number of rows at once; memory handed out is poisoned."""
    from csrc_tilelang import indexer_scores_backward

    case = draw(300, 700, 300, heads, width)
    first, again = run(case, relu), run(case, relu)
    check(first, case, relu)
    monkeypatch.setattr(indexer_scores_backward, "WORKSPACE_BYTES", 7 * 300 * width * 4)
    few = run(case, relu)
    for name in first:
        assert torch.equal(first[name], again[name]) and torch.equal(first[name], few[name]), name


@pytest.mark.parametrize("forward, backward", [(fused.fused, fused.unfused), (fused.unfused, fused.fused)])
def test_forward_and_backward_on_different_backends(forward, backward):
    case = draw(60, 400, 100, 64, 128)
    leaves = {n: case[n].clone().requires_grad_() for n in ("q", "k", "weights")}
    with forward():
        scores = dsa_ops.indexer_scores(*leaves.values(), case["ids"])
    with backward():
        scores.backward(case["grad"])
    got = {"scores": scores.detach(), **{n: x.grad for n, x in leaves.items()}}
    check(got, case, True)


def test_captured_in_a_graph():
    case = draw(100, 500, 130, 32, 128)
    run(case, True)  # compiles
    graph = torch.cuda.CUDAGraph()
    with fused.fused(), torch.cuda.graph(graph):
        scores = torch.ops.dsa.indexer_scores(case["q"], case["k"], case["weights"], case["ids"], True)
        grads = torch.ops.dsa.indexer_scores_backward(scores, case["q"], case["k"], case["weights"], case["ids"], True)
    fresh = draw(100, 500, 130, 32, 128)
    for name in ("q", "k", "weights", "ids"):
        case[name].copy_(fresh[name])
    graph.replay()
    got = dict(zip(("scores", "q", "k", "weights"), (scores, *grads), strict=True))
    case["grad"] = scores.clone()
    check(got, case, True)


def test_what_it_declines():
    case = draw(3, 4, 5, 16, 64)
    refuse = lambda **change: dsa_ops.explain(  # noqa: E731
        "indexer_scores", *[{**case, **change}[n] for n in ("q", "k", "weights", "ids")]
    )
    assert refuse().kernel == "indexer_scores"
    assert refuse(q=case["q"].float(), k=case["k"].float()).kernel is None
    assert refuse(q=case["q"][:, :3], weights=case["weights"][:, :3]).kernel is None
    assert refuse(q=case["q"][..., :32], k=case["k"][:, :32]).kernel is None
