"""The fused sparse MLA forward against float64 and the unfused op, and at the edges of the contract."""

import math

import pytest
import torch

import dsa_ops
import fused

pytestmark = pytest.mark.gpu

WIDTHS = ((576, 512), (512, 512), (160, 128))
HEADS = (1, 5, 16, 24, 64, 65, 96, 128)
SIZES = (  # T, S, K
    (1, 1, 1),
    (3, 70, 5),
    (130, 257, 63),
    (64, 64, 64),
    (33, 40, 65),
    (200, 3000, 129),
    (70, 5000, 1000),
    (257, 4097, 2048),
)


def pick(values):
    return values[int(torch.randint(0, len(values), ()))]


def draw(T, S, K, H, width, *, empty=0.2, sink=None, length=False):
    """The op's tensors by name, with ids of every kind: repeats, ids that name no key anywhere, rows without a key."""
    make = dict(device="cuda")
    ids = torch.randint(0, S, (T, K), dtype=torch.int32, **make)
    outside = torch.tensor([-1, -7, S, S + 1, 2**31 - 1, -(2**31)], dtype=torch.int32, **make)
    none = torch.rand(T, K, **make) < empty * torch.rand(T, 1, **make)
    ids[none] = outside[torch.randint(0, len(outside), (int(none.sum()),), **make)]
    tail = torch.randint(0, K + 1, (T,), **make)
    ids[(torch.arange(K, **make) >= tail[:, None]) & (torch.rand(T, 1, **make) < empty)] = -1
    ids[(torch.arange(K, **make) < tail[:, None]) & (torch.rand(T, 1, **make) < empty)] = -1
    return dict(
        q=torch.randn(T, H, width, **make).bfloat16(),
        kv=torch.randn(S, width, **make).bfloat16(),
        indices=ids,
        sink=None if sink is None else torch.randn(H, **make).mul(3).to(sink),
        topk_length=torch.randint(-2, K + 3, (T,), dtype=torch.int32, **make) if length else None,
    )


def valid_slots(case):
    ids, length = case["indices"], case["topk_length"]
    valid = (ids >= 0) & (ids < case["kv"].shape[0])
    if length is not None:
        valid &= torch.arange(ids.shape[1], device=ids.device) < length[:, None]
    return valid


def reference(case, scale, d_v):
    """out and lse in float64, and out as a kernel may round it: weights before their product, and the result."""
    q, kv, sink = case["q"], case["kv"], case["sink"]
    rows_at_once = max(1, 2**26 // (case["indices"].shape[1] * max(q.shape[1], q.shape[2])))
    parts = []
    for at in torch.arange(q.shape[0], device="cpu").split(rows_at_once):
        rows = slice(int(at[0]), int(at[-1]) + 1)
        valid = valid_slots(case)[rows]
        some = valid.any(1)[:, None]
        keys = kv[case["indices"][rows].masked_fill(~valid, 0).long()].double().masked_fill(~valid[..., None], 0)
        logits = scale * torch.einsum("thd,tkd->thk", q[rows].double(), keys)
        logits = logits.masked_fill(~valid[:, None], -math.inf)
        lse = torch.where(some, logits.logsumexp(-1), -math.inf)
        norm = lse if sink is None else torch.logaddexp(lse, sink.double())
        p = (logits - norm.masked_fill(~some, 0)[..., None]).exp()
        largest = logits.amax(-1).masked_fill(~some, 0)
        rounded = (logits - largest[..., None]).exp().bfloat16().double()
        values = keys[..., :d_v]
        factor = (largest - norm.masked_fill(~some, 0)).exp()[..., None]
        parts.append((p @ values, lse, ((rounded @ values) * factor).masked_fill(~some[..., None], 0).bfloat16()))
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def run(case, scale, d_v, backend=fused.fused):
    with backend():
        return torch.ops.dsa.sparse_mla(
            case["q"], case["kv"], case["indices"], scale, d_v, case["sink"], case["topk_length"]
        )


def check(got, case, scale, d_v):
    out, lse, baseline = reference(case, scale, d_v)
    assert got[0].dtype == torch.bfloat16 and got[1].dtype == torch.float32
    assert got[0].is_contiguous() and got[1].is_contiguous()
    fused.assert_as_good(got[0], baseline, out, "out")
    fused.assert_close(got[1], lse, "lse")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("size", SIZES, ids=lambda s: "T{}-S{}-K{}".format(*s))
@pytest.mark.parametrize("seed", range(4))
def test_is_right_for_a_drawn_case(size, seed):
    """Amid poison, with and without sink and length; the unfused op is held to the same."""
    width, d_v = pick(WIDTHS)
    sink, length = pick((None, torch.float32, torch.bfloat16)), pick((True, False))
    case = draw(*size, pick(HEADS), width, empty=pick((0.0, 0.2, 0.9)), sink=sink, length=length)
    case = {name: None if x is None else fused.guarded(x) for name, x in case.items()}
    scale = pick((width**-0.5, 0.3, 2.0))
    check(run(case, scale, d_v), case, scale, d_v)
    if size[0] < 200:
        check(run(case, scale, d_v, fused.unfused), case, scale, d_v)


@pytest.mark.parametrize("width, d_v", WIDTHS)
@pytest.mark.parametrize("heads", [16, 128])
def test_is_right_for_full_rows(width, d_v, heads):
    case = draw(200, 4000, 2048, heads, width, empty=0.0)
    check(run(case, width**-0.5, d_v), case, width**-0.5, d_v)


@pytest.mark.parametrize("heads", HEADS)
def test_serves_every_number_of_heads(heads):
    case = draw(7, 300, 200, heads, 576, sink=torch.float32, length=True)
    check(run(case, 0.05, 512), case, 0.05, 512)


@pytest.mark.parametrize("scale", [-0.1, 0.0, 1e-4, 5.0])
def test_takes_any_scale(scale):
    case = draw(20, 300, 200, 64, 160, sink=torch.float32)
    check(run(case, scale, 128), case, scale, 128)


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_largest_logits_may_come_first_or_last(order):
    """Sums are rescaled where the largest logit grows by more than a factor."""
    case = draw(4, 2000, 2000, 64, 576, empty=0.0)
    case["q"][:] = case["q"][:, :1]
    logits = case["q"][:, 0].double() @ case["kv"].double().T
    case["indices"] = logits.argsort(-1, descending=order == "descending").int()
    check(run(case, 0.2, 512), case, 0.2, 512)


@pytest.mark.parametrize("width, d_v", WIDTHS)
def test_empty_slots_have_no_effect(width, d_v):
    """NaN in keys that no slot in use names, past the length, and in the queries of rows without a key."""
    case = draw(90, 1000, 300, 70, width, sink=torch.float32, length=True)
    case["indices"][case["indices"] % 7 == 0] = -1
    case["indices"][5:9, :100] = -1
    case["topk_length"][5:9] = 100
    clean = {**case, "kv": case["kv"].clone(), "q": case["q"].clone()}
    case["kv"][::7] = torch.nan
    past = torch.arange(300, device="cuda") >= case["topk_length"][:, None]
    case["indices"][past] = 0  # a key that is NaN
    case["q"][5:9] = torch.nan
    got = run(case, 0.05, d_v)
    check(got, clean, 0.05, d_v)
    assert not got[0][5:9].any() and torch.isneginf(got[1][5:9]).all()
    for mine, other in zip(got, run(clean, 0.05, d_v), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("width, d_v", WIDTHS)
@pytest.mark.parametrize("slot", [0, 63, 64, 150])
def test_nan_of_a_key_in_use_surfaces(width, d_v, slot):
    case = draw(5, 400, 151, 64, width, empty=0.0)
    case["indices"][:] = torch.arange(151, device="cuda")
    case["indices"][2, slot] = 399
    case["kv"][399, 3] = torch.nan
    out, lse = run(case, 0.05, d_v)
    assert out[2].isnan().all() and lse[2].isnan().all()
    others = [0, 1, 3, 4]
    assert not out[others].isnan().any() and not lse[others].isnan().any()


def test_bits_depend_on_the_row_alone():
    case = draw(500, 3000, 700, 128, 576, sink=torch.float32)
    out, lse = run(case, 0.05, 512)
    for _ in range(10):
        again = run(case, 0.05, 512)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)
    rows = slice(123, 321)
    part = run({**case, "q": case["q"][rows], "indices": case["indices"][rows]}, 0.05, 512)
    assert torch.equal(part[0], out[rows]) and torch.equal(part[1], lse[rows])
    heads = run({**case, "q": case["q"][:, :70], "sink": case["sink"][:70]}, 0.05, 512)
    assert torch.equal(heads[0], out[:, :70]) and torch.equal(heads[1], lse[:, :70])


def test_a_key_listed_twice_counts_twice():
    case = draw(6, 100, 80, 16, 160, empty=0.0)
    case["indices"][:, 40:] = case["indices"][:, :40]
    check(run(case, 0.1, 128), case, 0.1, 128)
    once = run({**case, "indices": case["indices"][:, :40].contiguous()}, 0.1, 128)
    torch.testing.assert_close(run(case, 0.1, 128)[1], once[1] + math.log(2))


def test_takes_strided_and_unaligned_arguments():
    case = draw(40, 300, 90, 24, 576, sink=torch.bfloat16, length=True)
    want = run(case, 0.05, 512)
    strided = dict(
        q=case["q"].transpose(0, 1).contiguous().transpose(0, 1),
        kv=torch.cat([case["kv"]] * 2, 1)[:, :576],
        indices=case["indices"].T.contiguous().T,
        sink=case["sink"].repeat_interleave(2)[::2],
        topk_length=torch.cat([case["topk_length"][:1], case["topk_length"]])[1:],
    )
    unaligned = torch.empty(case["kv"].numel() + 1, dtype=torch.bfloat16, device="cuda")[1:].view_as(case["kv"])
    for kv in (strided["kv"], unaligned.copy_(case["kv"])):
        got = run({**strided, "kv": kv}, 0.05, 512)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("T, S", [(0, 5), (4, 0), (0, 0)])
def test_no_rows_or_no_keys(T, S):
    case = dict(
        q=torch.randn(T, 8, 576, device="cuda").bfloat16(),
        kv=torch.randn(S, 576, device="cuda").bfloat16(),
        indices=torch.zeros(T, 3, dtype=torch.int32, device="cuda"),
        sink=torch.randn(8, device="cuda"),
        topk_length=None,
    )
    out, lse = run(case, 0.05, 512)
    assert out.shape == (T, 8, 512) and not out.any() and torch.isneginf(lse).all()


@pytest.mark.parametrize("forward, backward", [("tilelang", "unfused"), ("unfused", "tilelang")])
def test_combines_with_a_backward_of_another_backend(forward, backward):
    case = draw(60, 500, 150, 64, 576, sink=torch.float32, length=True)
    case = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in case.items()}
    leaves = case["q"], case["kv"], case["sink"]
    grad_out, grad_lse = torch.randn(60, 64, 512, device="cuda").bfloat16(), torch.randn(60, 64, device="cuda")

    def gradients(first, second):
        with dsa_ops.backend(first):
            out, lse = torch.ops.dsa.sparse_mla(
                case["q"], case["kv"], case["indices"], 0.05, 512, case["sink"], case["topk_length"]
            )
        with dsa_ops.backend(second):
            return torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse))

    for got, want in zip(gradients(forward, backward), gradients("unfused", "unfused"), strict=True):
        assert fused.error(got, want) < 0.01


def test_captures_into_a_graph_and_runs_on_a_side_stream():
    case = draw(40, 300, 90, 64, 576, sink=torch.float32, length=True)
    want = run(case, 0.05, 512)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = run(case, 0.05, 512)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(case, 0.05, 512)
    for x in captured:
        x.fill_(math.nan)
    graph.replay()
    for got in (aside, captured):
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_offsets_past_2_31_elements(gpu_memory):
    """19 GB of queries: the last rows lie past 2^33 elements."""
    gpu_memory(60)
    T = 131072
    q = torch.empty(T, 128, 576, dtype=torch.bfloat16, device="cuda")
    rows = torch.tensor([0, 29127, 29128, 65536, T - 1], device="cuda")
    case = draw(len(rows), 300, 3, 128, 576, empty=0.0)
    ids = torch.full((T, 3), -1, dtype=torch.int32, device="cuda")
    q[rows], ids[rows] = case["q"], case["indices"]
    out, lse = run({**case, "q": q, "indices": ids}, 0.05, 512)
    check((out[rows], lse[rows]), case, 0.05, 512)
    assert torch.isneginf(lse).sum() == (T - len(rows)) * 128


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(dtype=torch.float16), "q is float16"),
        (dict(width=320, d_v=256), "320, 256"),
        (dict(width=576, d_v=500), "576, 500"),
    ],
)
def test_refuses_what_it_cannot_serve(change, reason):
    width, d_v = change.get("width", 576), change.get("d_v", 512)
    dtype = change.get("dtype", torch.bfloat16)
    q = torch.zeros(2, 4, width, dtype=dtype, device="cuda")
    kv, ids = torch.zeros(5, width, dtype=dtype, device="cuda"), torch.zeros(2, 3, dtype=torch.int32, device="cuda")
    explained = dsa_ops.explain("sparse_mla", q, kv, ids, 0.1, d_v)
    assert explained.backend == "unfused"
    assert any(reason in refusal for refusal in explained.refusals.values())
