"""Fused dense_indexer_kl and its backward against float64, the unfused op and their own promises."""

import random

import pytest
import torch

import fused

pytestmark = pytest.mark.gpu

NAMES = ("index_q", "index_k", "index_weights", "q", "k", "lse", "starts", "ends", "softmax_scale", "row_weight")
NAMES += ("relu", "total_heads")
GRADIENTS = ("index_q", "index_k", "index_weights")
SHAPES = ((576, 128, True), (192, 64, False), (160, 64, True))  # D, Di, latent keys: a sample that compiles little


def visible(starts, ends, keys):
    """[T, S]"""
    at = torch.arange(keys, device=starts.device)
    return (at >= starts.clamp(0, keys)[:, None]) & (at < ends.clamp(0, keys)[:, None])


def lse_of(q, k, seen, scale):
    lse = torch.empty(q.shape[:2], dtype=torch.float64, device=q.device)
    for h in range(q.shape[1]):
        logits = scale * q[:, h].double() @ (k if k.dim() == 2 else k[:, h]).double().T
        lse[:, h] = logits.masked_fill(~seen, -torch.inf).logsumexp(1)
    return lse.float()


def draw(T, S, H, Hi, D, Di, latent, *, bounds="causal", wide=True, relu=True, total_heads=0, scale=None):
    """Arguments of the op. Bounds: causal with the last row at the last key, or anything, empty and outside too."""

    def floats(*shape):
        return torch.randn(*shape, device="cuda")

    rows = torch.arange(T, device="cuda")
    if bounds == "causal":
        starts, ends = torch.zeros_like(rows), rows + 1 + max(0, S - T)
    elif bounds == "packed":  # sequences of 100
        starts, ends = rows // 100 * 100, rows + 1
    else:
        starts = torch.randint(-9, S + 9, (T,), device="cuda")
        ends = starts + torch.randint(-9, S + 9, (T,), device="cuda")
    starts, ends = starts.int(), ends.int()
    scale = D**-0.5 if scale is None else scale
    q, k = floats(T, H, D).bfloat16(), floats(*((S, D) if latent else (S, H, D))).bfloat16()
    weights = floats(T, Hi) * (Hi * Di) ** -0.5
    row_weight = floats(T) / T
    row_weight[::5] = 0
    return dict(
        index_q=floats(T, Hi, Di).bfloat16(),
        index_k=floats(S, Di).bfloat16(),
        index_weights=weights if wide else weights.bfloat16(),
        q=q,
        k=k,
        lse=lse_of(q, k, visible(starts, ends, S), scale),
        starts=starts,
        ends=ends,
        softmax_scale=scale,
        row_weight=row_weight if wide else row_weight.bfloat16(),
        relu=relu,
        total_heads=total_heads,
    )


def op(args):
    return torch.ops.dsa.dense_indexer_kl.default(*(args[n] for n in NAMES))


def grads_of(args, grad_loss, needs=(True,) * 3):
    inputs = [args[n] for n in NAMES]
    return torch.ops.dsa.dense_indexer_kl_backward.default(grad_loss, *inputs, *needs)


def reference(args, grad_loss):
    """loss, kl and the gradients in float64; and the gradients with dS and results rounded to bfloat16."""
    index_q, index_k, weights, q, k, lse, starts, ends, scale, row_weight, relu, total = (args[n] for n in NAMES)
    index_q, index_k, weights, row_weight = (x.double() for x in (index_q, index_k, weights, row_weight))
    heads, seen = q.shape[1], visible(starts, ends, k.shape[0])
    total = total or heads
    p, score = torch.zeros_like(seen, dtype=torch.float64), torch.zeros_like(seen, dtype=torch.float64)
    for h in range(heads):
        logits = scale * q[:, h].double() @ (k if k.dim() == 2 else k[:, h]).double().T
        p += (logits - lse[:, h, None].double()).exp() / total
    p.masked_fill_(~seen, 0)
    for h in range(index_q.shape[1]):
        product = index_q[:, h] @ index_k.T
        score += weights[:, h, None] * (product.relu() if relu else product)
    log_share = score.masked_fill(~seen, -torch.inf)
    log_share = log_share - log_share.logsumexp(1, keepdim=True).nan_to_num(0, neginf=0)
    ratio = (p.log() if total == heads else 0) - log_share
    kl = (p * ratio).masked_fill(p == 0, 0).sum(1)
    coefficient = (row_weight * grad_loss.double())[:, None]
    grad_score = (coefficient * (log_share.exp() * (heads / total) - p)).masked_fill(~seen, 0)
    exact = [torch.zeros_like(x) for x in (index_q, index_k, weights)]
    rounded = [torch.zeros_like(x) for x in (index_q, index_k)]
    for h in range(index_q.shape[1]):
        product = index_q[:, h] @ index_k.T
        grad = grad_score * weights[:, h, None] * ((product > 0) if relu else 1)
        exact[2][:, h] = (grad_score * (product.relu() if relu else product)).sum(1)
        for (grad_q, grad_k), x in ((exact[:2], grad), (rounded, grad.bfloat16().double())):
            grad_q[:, h] = x @ index_k
            grad_k += x.T @ index_q[:, h]
    return (row_weight * kl).sum(), kl, exact, [x.bfloat16() for x in rounded]


def check(args, grad_loss=None):
    """Forward and backward against float64, and the unfused ones beside them."""
    grad_loss = torch.tensor(0.7, device="cuda") if grad_loss is None else grad_loss
    want_loss, want_kl, want, baseline = reference(args, grad_loss)
    with fused.fused():
        results = (*op(args), *grads_of(args, grad_loss))
    with fused.unfused():
        others = (*op(args), *grads_of(args, grad_loss))
    for name, mine, other in zip(("loss", "kl", *GRADIENTS), results, others, strict=True):
        assert mine.dtype == other.dtype and mine.shape == other.shape and mine.is_contiguous(), name
    loss, kl, *grads = results

    def distance(kl):
        return (kl.double() - want_kl).norm().item()

    # float32 logits of size 30 have errors of 1e-5; a divergence is what is left of terms as large as the entropies
    allowed = max(1e-5 * want_kl.norm().item() + 1e-6 * kl.shape[0] ** 0.5, 2 * distance(others[1]))
    assert distance(kl) <= allowed, (distance(kl), allowed)
    weight = args["row_weight"].double()
    assert (loss - want_loss).abs() <= 1e-5 * (weight * want_kl).abs().sum() + allowed * weight.norm()
    if args["k"].shape[0] == 1:  # both distributions are 1: what is left is rounding
        assert all(grad.abs().amax() < 1e-5 for grad in grads)
        return results
    for name, mine, other, true in zip(GRADIENTS, grads, others[2:], want, strict=True):
        fused.assert_as_good(mine, other, true, f"{name} and unfused")
    for name, mine, rounded, true in zip(GRADIENTS, grads, baseline, want[:2], strict=False):
        fused.assert_as_good(mine, rounded, true, name)
    return results


@pytest.mark.parametrize("seed", range(16))
def test_draws(seed):
    pick = random.Random(seed)
    D, Di, latent = SHAPES[seed % len(SHAPES)]
    large = seed % 4 == 3
    T, S = pick.randint(1, 1500 if large else 300), pick.randint(1, 2000 if large else 300)
    H, Hi = pick.choice([1, 2, 3, 7, 16, 24]), pick.choice([4, 8, 16, 32, 64])
    check(
        draw(
            *(T, S, H, Hi, D, Di, latent),
            bounds=pick.choice(["causal", "any", "any", "packed"]),
            wide=pick.random() < 0.6,
            relu=pick.random() < 0.7,
            total_heads=pick.choice([0, 0, H, 2 * H + 1]),
            scale=pick.choice([None, 0.3]),
        )
    )


@pytest.mark.parametrize("T, S", [(1, 1), (1, 500), (128, 128), (129, 127), (5, 1), (257, 64)])
def test_small(T, S):
    check(draw(T, S, 3, 4, 576, 128, True, bounds="any" if T > 1 else "causal"))


def test_rows_without_keys_and_of_weight_zero():
    args = draw(300, 200, 2, 4, 576, 128, True)
    args["starts"][40:200], args["ends"][40:200] = 7, 7
    args["lse"][40:200] = -torch.inf
    args["row_weight"][40:200] = torch.nan
    args["row_weight"][200:] = 0
    args["index_weights"][100:] = torch.nan  # of rows without keys, then of rows that do not count
    with fused.fused():
        loss, kl = op(args)
        grads = grads_of(args, torch.tensor(1.0, device="cuda"))
    assert loss.isfinite() and not kl[40:200].any()
    assert not grads[0][40:].any() and not grads[2][40:].any() and grads[1].isfinite().all()
    args["index_weights"][100:] = 0
    args["row_weight"][40:200] = 0
    want_loss, _, want, baseline = reference(args, torch.tensor(1.0))
    fused.assert_close(loss, want_loss, "loss")
    fused.assert_as_good(grads[1], baseline[1], want[1], "index_k")


@pytest.mark.parametrize("rows, keys", [(0, 5), (5, 0), (0, 0)])
def test_nothing(rows, keys):
    args = draw(5, 5, 2, 4, 576, 128, True)
    for n in NAMES:
        if isinstance(args[n], torch.Tensor):
            args[n] = args[n][: keys if n in ("k", "index_k") else rows]
    with fused.fused():
        loss, kl = op(args)
        grads = grads_of(args, torch.tensor(1.0, device="cuda"))
    assert loss == 0 and kl.shape == (rows,) and not kl.any()
    assert all(grad.shape == args[n].shape and not grad.any() for grad, n in zip(grads, GRADIENTS, strict=True))


def test_nan_stays_where_it_is_seen():
    """Key 200 or row 100 is NaN: rows that do not see the one, keys that the other does not see, do not notice."""
    grad_loss = torch.tensor(1.0, device="cuda")
    for name, at in (("k", 200), ("index_k", 200), ("index_q", 100), ("index_weights", 100), ("q", 100), ("lse", 100)):
        args = draw(300, 413, 2, 4, 576, 128, True, bounds="any")
        args["row_weight"] = args["row_weight"].abs() + 0.1
        args["starts"][100], args["ends"][100] = 150, 250
        seen = visible(args["starts"], args["ends"], 413)
        with fused.fused():
            before = (*op(args), *grads_of(args, grad_loss))
            args[name][at] = torch.nan
            after = (*op(args), *grads_of(args, grad_loss))
        rows = seen[:, 200] if at == 200 else torch.arange(300, device="cuda") == 100
        keys = torch.arange(413, device="cuda") == 200 if name == "k" else seen[rows].any(0)
        assert after[0].isnan() and after[1][rows].isnan().all(), name
        assert after[2][rows].flatten(1).isnan().any(1).all() and after[3][keys].isnan().any(1).all(), name
        for i, touched in ((1, rows), (2, rows), (3, keys), (4, rows)):
            assert torch.equal(after[i][~touched], before[i][~touched]), (name, i)


def test_memory_around_inputs(poisoned):
    args = draw(333, 222, 3, 8, 192, 64, False, bounds="any")
    plain = check(args)
    guarded = check({n: fused.guarded(x) if isinstance(x, torch.Tensor) else x for n, x in args.items()})
    assert all(torch.equal(a, b) for a, b in zip(plain, guarded, strict=True))


def test_strides():
    """Slices and transposed views, also where they begin off 16 bytes."""

    def sliced(x):
        wide = x.new_full((*x.shape[:-1], x.shape[-1] + 3), float("nan") if x.is_floating_point() else 7)
        wide[..., 1:-2] = x
        return wide[..., 1:-2]

    args = draw(200, 300, 3, 8, 576, 128, True, bounds="any")
    plain = check(args)
    for change in (sliced, lambda x: x.transpose(0, -1).contiguous().transpose(0, -1)):
        strided = {n: change(x) if isinstance(x, torch.Tensor) else x for n, x in args.items()}
        with fused.fused():
            got = (*op(strided), *grads_of(strided, torch.tensor(0.7, device="cuda")))
        assert all(torch.equal(a, b) for a, b in zip(plain, got, strict=True))


def test_bits_depend_on_nothing_else(monkeypatch):
    """Again, in small chunks of rows, and for a part of the rows."""
    args = draw(1100, 900, 3, 32, 576, 128, True, bounds="any")
    grad_loss = torch.tensor(1.0, device="cuda")
    with fused.fused():
        first = (*op(args), *grads_of(args, grad_loss))
        again = (*op(args), *grads_of(args, grad_loss))
        monkeypatch.setenv("DSA_OPS_WORKSPACE_MB", "0.5")
        chunked = (*op(args), *grads_of(args, grad_loss))
        rows = {
            n: x if n in ("k", "index_k") or not isinstance(x, torch.Tensor) else x[77:401] for n, x in args.items()
        }
        part = (*op(rows), *grads_of(rows, grad_loss))
    for a, b, c in zip(first, again, chunked, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    for i in (1, 2, 4):
        assert torch.equal(first[i][77:401], part[i])


def test_shards_add_up():
    """Heads on two ranks: losses add to the cross entropy, gradients to the whole one."""
    args = draw(150, 260, 6, 8, 192, 64, False)
    grad_loss = torch.tensor(1.0, device="cuda")
    with fused.fused():
        whole = grads_of(args, grad_loss)
        parts = []
        for heads in (slice(0, 2), slice(2, 6)):
            mine = {n: args[n][:, heads] for n in ("q", "k", "lse")}
            parts.append(grads_of({**args, **mine, "total_heads": 6}, grad_loss))
    for i, n in enumerate(GRADIENTS):
        assert fused.error(parts[0][i].double() + parts[1][i].double(), whole[i]) < 1e-2, n


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True), (False,) * 3])
def test_only_what_is_needed(needs):
    args = draw(140, 70, 2, 4, 576, 128, True)
    grad_loss = torch.tensor(1.0, device="cuda")
    with fused.fused():
        everything, some = grads_of(args, grad_loss), grads_of(args, grad_loss, needs)
    for need, a, b in zip(needs, everything, some, strict=True):
        assert torch.equal(a, b) if need else b.numel() == 0


@pytest.mark.parametrize("forward, backward", [(fused.fused, fused.unfused), (fused.unfused, fused.fused)])
def test_mixed_backends(forward, backward):
    args = draw(150, 150, 3, 8, 576, 128, True)
    for n in GRADIENTS:
        args[n].requires_grad_()
    with forward():
        loss, _ = op(args)
    with backward():
        grads = torch.autograd.grad(loss, [args[n] for n in GRADIENTS])
    _, _, want, baseline = reference(
        {n: x.detach() if torch.is_tensor(x) else x for n, x in args.items()}, loss * 0 + 1
    )
    fused.assert_as_good(grads[0], baseline[0], want[0], "index_q")
    fused.assert_as_good(grads[1], baseline[1], want[1], "index_k")
    fused.assert_close(grads[2], want[2], "index_weights", 2e-5)
