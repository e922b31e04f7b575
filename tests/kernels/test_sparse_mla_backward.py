"""The fused backward of sparse MLA against float64, against the unfused op, and where the contract has corners."""

import functools
import random

import pytest
import torch

import dsa_ops
import fused

pytestmark = pytest.mark.gpu

WIDTHS = (576, 512), (512, 512), (160, 128)
NAMES = "grad_q", "grad_kv", "grad_sink"


def truth(case, low=False):
    """Gradients, out and lse in float64; with `low` in the precision that a kernel may use (see `fused`)."""
    dtype = torch.float32 if low else torch.float64
    rounded = functools.partial(torch.Tensor.to, dtype=torch.bfloat16) if low else torch.Tensor.double
    q, kv, indices, sink, length = (case[name] for name in ("q", "kv", "indices", "sink", "topk_length"))
    scale, d_v, S = case["softmax_scale"], case["d_v"], kv.shape[0]
    valid = (indices >= 0) & (indices < S)
    if length is not None:
        valid &= torch.arange(indices.shape[1], device=q.device) < length[:, None]
    filled = valid.any(1)
    q, ids = q.to(dtype), indices.where(valid, 0).long()
    keys = kv.to(dtype)[ids].where(valid[..., None], 0)
    logits = torch.einsum("thd,tkd->thk", q, keys).mul(scale).masked_fill(~valid[:, None], -torch.inf)
    lse = logits.logsumexp(-1).where(filled[:, None], 0)
    norm = lse if sink is None else torch.logaddexp(lse, sink.to(dtype))
    p, p_lse = (logits - norm[..., None]).exp(), (logits - lse[..., None]).exp()
    if low and case["out"] is not None:
        out = case["out"].where(filled[:, None, None], 0)
    else:
        out = torch.einsum("thk,tkd->thd", rounded(p).to(dtype), keys[..., :d_v])
    grad_logits, grad_sink = torch.zeros_like(p), None if sink is None else torch.zeros_like(sink, dtype=dtype)
    if (grad_out := case["grad_out"]) is not None:
        grad_out = grad_out.to(torch.bfloat16).to(dtype).where(filled[:, None, None], 0)
        delta = (grad_out * rounded(out).to(dtype)).sum(-1)
        grad_logits += p * (torch.einsum("thd,tkd->thk", grad_out, keys[..., :d_v]) - delta[..., None])
        if sink is not None:
            grad_sink -= ((sink.to(dtype) - lse).sigmoid() * delta).sum(0)
    if case["grad_lse"] is not None:
        grad_logits += p_lse * case["grad_lse"].to(dtype).where(filled[:, None], 0)[..., None]
    grad_logits, p = rounded(grad_logits * scale).to(dtype), rounded(p).to(dtype)
    grad_q = torch.einsum("thk,tkd->thd", grad_logits, keys)
    grad_keys = torch.einsum("thk,thd->tkd", grad_logits, q)
    if grad_out is not None:
        grad_keys[..., :d_v] += torch.einsum("thk,thd->tkd", p, grad_out)
    grad_kv = torch.zeros(kv.shape, dtype=dtype, device=q.device).index_put_(
        (ids[valid],), grad_keys[valid], accumulate=True
    )
    grads = [grad_q, grad_kv, grad_sink]
    if low:
        grads = [rounded(grad_q), rounded(grad_kv), None if sink is None else grad_sink.to(sink.dtype)]
    return grads, out, lse.masked_fill(~filled[:, None], -torch.inf), filled


def draw(
    T=7, S=90, H=8, K=70, widths=(576, 512), sink=True, length=True, grad_out=True, grad_lse=True, wide=True, empty=0.1
):
    """A call's arguments, the saved out and lse among them, with empty slots and rows strewn in."""
    D, d_v = widths

    def floats(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, device="cuda").to(dtype)

    indices = torch.randint(S, (T, K), dtype=torch.int32, device="cuda")
    outside = torch.where(torch.rand(T, K, device="cuda") < 0.5, -1, S + torch.randint(9, (T, K), device="cuda")).int()
    indices = torch.where(torch.rand(T, K, device="cuda") < empty, outside, indices)
    if empty and T > 3:
        indices[T // 2] = -1
        indices[1, : K // 2] = -5
    case = dict(
        grad_out=floats(T, H, d_v) if grad_out else None,
        grad_lse=floats(T, H, dtype=torch.float32) if grad_lse else None,
        q=floats(T, H, D),
        kv=floats(S, D),
        indices=indices,
        out=None,
        lse=None,
        softmax_scale=D**-0.5,
        d_v=d_v,
        sink=floats(H, dtype=torch.float32 if wide else torch.bfloat16) if sink else None,
        topk_length=torch.randint(-1, K + 3, (T,), dtype=torch.int32, device="cuda") if length else None,
    )
    grads, out, lse, filled = truth(case)
    case["out"], case["lse"] = out.to(torch.bfloat16), lse.float()
    return case, grads, filled


def run(case, **needs):
    with fused.fused():
        return torch.ops.dsa.sparse_mla_backward(**case, **needs)


def check(got, case, grads):
    baseline = truth(case, low=True)[0]
    for name, mine, low, want in zip(NAMES, got, baseline, grads, strict=True):
        if want is None or mine.numel() != want.numel():
            assert mine.numel() == 0
            continue
        assert mine.is_contiguous()
        if want.norm() < 1e-6 * want.numel() ** 0.5:  # cancelled: one key alone has no gradient through the softmax
            assert (mine.double() - want).abs().amax() < 1e-3, name
        else:
            fused.assert_as_good(mine, low, want, name)


def poison(case, filled):
    """NaN wherever nothing may read: the empty rows' gradients and saved values, keys that no row selects."""
    case = dict(case)
    for name in ("grad_out", "grad_lse", "out", "lse"):
        if case[name] is not None:
            case[name] = case[name].clone()
            case[name][~filled] = torch.nan
    valid = (case["indices"] >= 0) & (case["indices"] < case["kv"].shape[0])
    if case["topk_length"] is not None:
        valid &= torch.arange(valid.shape[1], device="cuda") < case["topk_length"][:, None]
    unused = torch.ones(case["kv"].shape[0], dtype=torch.bool, device="cuda")
    unused[case["indices"][valid].long()] = False
    case["kv"] = case["kv"].clone()
    case["kv"][unused] = torch.nan
    return case


@pytest.mark.parametrize("number", range(24))
def test_random_draws(number):
    random.seed(number)
    T = random.choice((1, 2, 5, 33, 130))
    options = {name: random.random() < 0.5 for name in ("sink", "length", "grad_lse", "wide")}
    case, grads, filled = draw(
        T,
        S=random.choice((1, 3, 63, 64, 500, 4097)),
        H=random.choice((1, 4, 8, 16, 24, 63, 64, 65, 96, 128, 130)),
        K=random.choice((1, 2, 17, 63, 64, 65, 128, 333)),
        widths=random.choice(WIDTHS),
        grad_out=not options["grad_lse"] or random.random() < 0.8,
        **options,
    )
    check(run(poison(case, filled)), case, grads)


@pytest.mark.parametrize("widths", WIDTHS)
def test_long_rows(widths):
    case, grads, _ = draw(16, 3000, 128, 2048, widths)
    check(run(case), case, grads)


@pytest.mark.parametrize("need_q", [True, False])
@pytest.mark.parametrize("need_kv", [True, False])
@pytest.mark.parametrize("need_sink", [True, False])
@pytest.mark.parametrize("sink", [True, False])
def test_only_what_is_needed(need_q, need_kv, need_sink, sink):
    case, grads, _ = draw(widths=(160, 128), sink=sink)
    got = run(case, need_q=need_q, need_kv=need_kv, need_sink=need_sink)
    assert [g.numel() > 0 for g in got] == [need_q, need_kv, need_sink and sink]
    check(got, case, [g if need else None for g, need in zip(grads, (need_q, need_kv, need_sink), strict=True)])


@pytest.mark.parametrize("grad_out", [True, False])
def test_against_unfused(grad_out):
    case, grads, _ = draw(40, 300, 20, 130, grad_out=grad_out)
    got = run(case)
    with fused.unfused():
        unfused = torch.ops.dsa.sparse_mla_backward(**case)
    for name, mine, other, want in zip(NAMES, got, unfused, grads, strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        if want.norm() > 0:
            fused.assert_as_good(mine, other, want, name)


def test_no_rows_no_keys():
    for T, S in (0, 9), (4, 0), (0, 0):
        case = dict(
            grad_out=torch.randn(T, 3, 512, device="cuda").bfloat16(),
            grad_lse=None,
            q=torch.randn(T, 3, 576, device="cuda").bfloat16(),
            kv=torch.randn(S, 576, device="cuda").bfloat16(),
            indices=torch.zeros(T, 5, dtype=torch.int32, device="cuda"),
            out=torch.zeros(T, 3, 512, device="cuda").bfloat16(),
            lse=torch.full((T, 3), -torch.inf, device="cuda"),
            softmax_scale=0.1,
            d_v=512,
            sink=torch.zeros(3, device="cuda"),
        )
        for name, got in zip(("q", "kv", "sink"), run(case), strict=True):
            assert torch.equal(got, torch.zeros_like(case[name]))


def test_every_row_empty():
    case, _, filled = draw(empty=1.0, length=False)
    assert not filled.any()
    for got in run(poison(case, filled)):
        assert torch.count_nonzero(got) == 0


def test_keys_listed_twice_count_twice():
    case, grads, _ = draw(6, 5, 16, 80, empty=0.0)
    check(run(case), case, grads)


@pytest.mark.parametrize("sink", [-1e4, -torch.inf, 1e4, 30.0])
def test_extreme_sinks(sink):
    case, _, _ = draw(5, 40, 8, 30, length=False)
    case["sink"] = torch.full_like(case["sink"], sink)
    grads, out, lse, _ = truth(case)
    case["out"], case["lse"] = out.to(torch.bfloat16), lse.float()
    got = run(case)
    for name, mine, want in zip(NAMES[:2], got, grads, strict=False):
        assert fused.error(mine, want) < 1e-2, name
    assert got[2].isfinite().all()


def test_memory_around_is_neither_read_nor_written():
    case, grads, filled = draw(13, 77, 24, 65)
    guarded = {name: fused.guarded(x) if isinstance(x, torch.Tensor) else x for name, x in poison(case, filled).items()}
    check(run(guarded), case, grads)


def test_strided_inputs():
    case, grads, _ = draw(9, 60, 6, 40)

    def strided(x):
        wide = x.new_empty(*x.shape[:-1], x.shape[-1] + 1)
        wide[..., 1:] = x
        return wide[..., 1:]

    check(run({name: strided(x) if isinstance(x, torch.Tensor) else x for name, x in case.items()}), case, grads)
    expanded = dict(case, grad_lse=torch.ones((), device="cuda").expand(case["lse"].shape))
    check(run(expanded), expanded, truth(expanded)[0])


def test_float32_gradients_come_in():
    case, grads, _ = draw()
    case["grad_out"] = case["grad_out"].float()
    check(run(case), case, grads)


def test_rows_do_not_depend_on_each_other():
    case, _, _ = draw(20, 100, 40, 90)
    whole = run(case)[0]
    assert torch.equal(whole, run(case)[0])
    part = {
        name: x[7:12] if name in ("grad_out", "grad_lse", "q", "indices", "out", "lse", "topk_length") else x
        for name, x in case.items()
    }
    assert torch.equal(whole[7:12], run(part)[0])


@pytest.mark.parametrize("widths", [(576, 512), (160, 128)])
def test_deterministic(widths, monkeypatch):
    from csrc_tilelang import sparse_mla_backward

    case, grads, filled = draw(50, 60, 100, 150, widths)
    torch.use_deterministic_algorithms(True)
    try:
        first = run(poison(case, filled))
        for workspace in (1 << 30, 7 * 2 * 150 * widths[0] * 4, 1):  # bytes: chunks of all rows, of 7, of 1
            monkeypatch.setattr(sparse_mla_backward, "WORKSPACE", workspace)
            for one, other in zip(first, run(poison(case, filled)), strict=True):
                assert torch.equal(one, other)
    finally:
        torch.use_deterministic_algorithms(False)
    check(first, case, grads)


@pytest.mark.parametrize("forward, backward", [("unfused", "tilelang"), ("auto", "unfused"), ("auto", "tilelang")])
def test_autograd_over_backends(forward, backward):
    case, grads, _ = draw(60, 300, 96, 100)
    leaves = [case[name].clone().requires_grad_() for name in ("q", "kv", "sink")]
    with dsa_ops.backend(forward):
        out, lse = torch.ops.dsa.sparse_mla(
            *leaves[:2], case["indices"], case["softmax_scale"], case["d_v"], leaves[2], case["topk_length"]
        )
    with dsa_ops.backend(backward):
        torch.autograd.backward([out, lse], [case["grad_out"], case["grad_lse"]])
    check([x.grad for x in leaves], dict(case, out=None), grads)  # out is what that forward made of it


def test_more_than_2_to_the_31_elements(gpu_memory):
    gpu_memory(100)
    T, H, D, d_v, S, K = 131072, 128, 576, 512, 1000, 8
    q, grad_out = (torch.empty(T, H, d, dtype=torch.bfloat16, device="cuda") for d in (D, d_v))
    for x in q, grad_out:
        x.view(64, -1).copy_(torch.randn(x.numel() // 64, device="cuda").bfloat16())
    kv = torch.randn(S, D, device="cuda").bfloat16()
    indices = torch.randint(S, (T, K), dtype=torch.int32, device="cuda")
    out, lse = torch.zeros_like(grad_out), torch.zeros(T, H, device="cuda")
    case = dict(grad_lse=None, kv=kv, softmax_scale=D**-0.5, d_v=d_v, sink=None, topk_length=None)
    rows = torch.tensor([0, 1, T // 2, T - 1], device="cuda")
    few = dict(case, q=q[rows], grad_out=grad_out[rows], indices=indices[rows])
    grads, few["out"], few["lse"], _ = truth(few)
    out[rows], lse[rows] = few["out"].to(torch.bfloat16), few["lse"].float()
    grad_q, _, _ = run(dict(case, q=q, grad_out=grad_out, indices=indices, out=out, lse=lse), need_kv=False)
    check([grad_q[rows], kv.new_empty(0), kv.new_empty(0)], few, [grads[0], None, None])
