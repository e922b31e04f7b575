"""The fused attention target against float64 and against the unfused op."""

import pytest
import torch

import dsa_ops
import fused

pytestmark = pytest.mark.gpu
WIDTHS = (576, 512, 160)


def used_slots(indices, num_keys, topk_length=None):
    used = (indices >= 0) & (indices < num_keys)
    if topk_length is not None:
        used &= torch.arange(indices.shape[1], device=indices.device) < topk_length[:, None]
    return used


def logits_of(q, kv, indices, used, scale):
    """float64 [T, H, K], -inf in empty slots; only keys in use are read."""
    keys = kv.new_zeros(*indices.shape, kv.shape[1], dtype=torch.float64)
    keys[used] = kv[indices[used].long()].double()
    logits = scale * torch.einsum("thd,tkd->thk", q.double(), keys)
    return logits.masked_fill_(~used[:, None], -torch.inf)


def reference(q, kv, lse, indices, scale, topk_length=None):
    used = used_slots(indices, kv.shape[0], topk_length)
    rows = []
    for part in torch.arange(q.shape[0], device=q.device).split(32):
        logits = logits_of(q[part], kv, indices[part], used[part], scale)
        share = (logits - lse[part, :, None].double()).exp().sum(1)
        rows.append(torch.where(used[part], share, 0.0))
    return torch.cat(rows)


def draw(T, S, H, D, K, *, lengths=False, empty=0.1, spread=1.0):
    """q, kv, lse, indices, scale, topk_length. No slot names key 0, which is NaN; lse is the row's own."""
    q = (torch.randn(T, H, D, device="cuda") * spread).bfloat16()
    kv = torch.randn(S, D, device="cuda").bfloat16()
    indices = torch.randint(min(1, S - 1), S, (T, K), device="cuda", dtype=torch.int32)
    kind = torch.rand(T, K, device="cuda")
    indices[kind < empty] = -1
    indices[(kind >= empty) & (kind < 1.2 * empty)] = S
    indices[(kind >= 1.2 * empty) & (kind < 1.3 * empty)] = 2**31 - 1
    indices[(kind >= 1.3 * empty) & (kind < 1.4 * empty)] = -(2**31)
    if S > 1:
        kv[0] = torch.nan
    if T > 2:
        indices[T // 2] = -1
        indices[T // 3, K // 3 :] = -1
    topk_length = torch.randint(-2, K + 3, (T,), device="cuda", dtype=torch.int32) if lengths else None
    scale = D**-0.5
    used = used_slots(indices, S, topk_length)
    lse = torch.cat(
        [
            logits_of(q[part], kv, indices[part], used[part], scale).logsumexp(-1)
            for part in torch.arange(T, device="cuda").split(32)
        ]
    )
    return q, kv, lse.float(), indices, scale, topk_length


def target(*args):
    with fused.fused():
        return torch.ops.dsa.attention_target(*args)


SIZES = [
    (1, 1, 1, 576, 1),
    (3, 70, 5, 576, 63),
    (130, 33, 16, 576, 65),
    (64, 5000, 64, 576, 2048),
    (65, 3000, 65, 576, 700),
    (64, 40000, 128, 576, 2048),
    (40, 900, 96, 576, 129),
    (17, 500, 300, 576, 190),
    (50, 300, 24, 512, 257),
    (50, 300, 128, 512, 1000),
    (1, 20000, 128, 512, 1),
    (100, 150, 8, 160, 64),
    (33, 2000, 72, 160, 501),
]


@pytest.mark.parametrize("lengths", [False, True], ids=["all", "lengths"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values(size, lengths, poisoned):
    args = draw(*size, lengths=lengths)
    kv, indices, topk_length = args[1], args[3], args[5]
    guarded = [x if x is None or isinstance(x, float) else fused.guarded(x) for x in args]
    got = target(*guarded)
    assert got.dtype == torch.float32 and got.is_contiguous()
    fused.assert_close(got, reference(*args), "target")
    assert (got[~used_slots(indices, kv.shape[0], topk_length)] == 0).all()
    with fused.unfused():
        fused.assert_close(got, torch.ops.dsa.attention_target(*args), "target against unfused")


@pytest.mark.parametrize("seed", range(12))
def test_random_draws(seed, poisoned):
    pick = torch.Generator().manual_seed(seed)

    def between(low, high):
        """Sizes of every magnitude alike."""
        return round(low * (high / low) ** torch.rand((), generator=pick).item())

    D = WIDTHS[between(1, 3) - 1]
    T, S, H, K = between(1, 300), between(1, 30000), between(1, 200), between(1, 2048)
    args = draw(T, S, H, D, K, lengths=seed % 2 == 0, empty=(0.0, 0.1, 0.6)[seed % 3])
    fused.assert_close(target(*args), reference(*args), f"T{T} S{S} H{H} D{D} K{K}")


def test_a_row_sums_to_the_heads():
    args = draw(50, 3000, 128, 576, 600)
    keys = used_slots(args[3], 3000).any(1)
    torch.testing.assert_close(target(*args).sum(1), 128.0 * keys.float(), rtol=1e-5, atol=0)


def test_large_logits():
    """An exponential makes a relative error of what rounding leaves in a logit: 1e-5 and more of 80 in float32."""
    args = draw(32, 2000, 64, 576, 512, spread=20.0)
    assert args[2][args[2].isfinite()].max() > 60
    with fused.unfused():
        baseline = torch.ops.dsa.attention_target(*args)
    fused.assert_as_good(target(*args), baseline, reference(*args), "target", floor=5e-5)


@pytest.mark.parametrize("heads", [3, 100, 128])
def test_nan_in_a_key_that_is_selected(heads):
    q, kv, lse, indices, scale, _ = draw(20, 400, heads, 576, 150)
    kv[77] = torch.nan
    indices[:, 40] = 77
    got, hit = target(q, kv, lse, indices, scale, None), indices == 77
    assert got[hit].isnan().all() and got[~hit].isfinite().all()


@pytest.mark.parametrize("heads", [3, 100])
def test_infinity_in_a_key_that_is_selected(heads):
    """Heads that only fill up a tile must not turn an infinite logit into NaN, nor hide one."""
    q, kv, lse, indices, scale, _ = draw(20, 400, heads, 576, 150)
    q[:, :, 5] = q[:, :, 5].abs() + 1
    kv[77, 5], kv[78, 5] = -torch.inf, torch.inf
    indices[:, 40], indices[:, 41] = 77, 78
    lse[:] = 3.0
    got = target(q, kv, lse, indices, scale, None)
    assert (got[indices == 77] == 0).all() and (got[indices == 78] == torch.inf).all()


def test_lse_of_empty_rows_does_not_matter():
    q, kv, lse, indices, scale, _ = draw(20, 400, 16, 576, 150)
    indices[::2] = -1
    for value in (-torch.inf, torch.nan, 0.0):
        lse[::2] = value
        got = target(q, kv, lse, indices, scale, None)
        assert (got[::2] == 0).all() and got.isfinite().all()


def test_duplicates_count_each():
    q, kv, lse, indices, scale, _ = draw(20, 400, 16, 576, 150, empty=0.0)
    indices[:, 100] = indices[:, 3]
    got = target(q, kv, lse, indices, scale, None)
    assert torch.equal(got[:, 100], got[:, 3])


@pytest.mark.parametrize("heads", [64, 128, 200])
def test_bits(heads):
    """Equal from run to run, whatever the other rows are, and wherever a key stands."""
    q, kv, lse, indices, scale, _ = draw(300, 3000, heads, 576, 300)
    first = target(q, kv, lse, indices, scale, None)
    for _ in range(5):
        assert torch.equal(target(q, kv, lse, indices, scale, None), first)
    assert torch.equal(target(q[7:9], kv, lse[7:9], indices[7:9], scale, None), first[7:9])
    assert torch.equal(target(q, kv, lse, indices.flip(1), scale, None), first.flip(1))
    wider = torch.cat([indices, indices.new_full((300, 77), -1)], 1)
    assert torch.equal(target(q, kv, lse, wider, scale, None)[:, :300], first)


def test_strided_inputs():
    q, kv, lse, indices, scale, lengths = draw(40, 500, 32, 576, 130, lengths=True)
    want = target(q, kv, lse, indices, scale, lengths)
    shifted = q.new_empty(q.numel() + 1)[1:].view(q.shape).copy_(q)  # two bytes from an aligned address
    assert torch.equal(target(shifted, kv, lse, indices, scale, lengths), want)
    strided = [
        q.transpose(0, 1).contiguous().transpose(0, 1),
        kv.repeat(1, 2)[:, :576],
        lse.T.contiguous().T,
        indices.repeat_interleave(2, 1)[:, ::2],
        scale,
        lengths.repeat_interleave(2)[::2],
    ]
    assert torch.equal(target(*strided), want)


def test_no_rows_and_no_keys():
    q, kv, lse, indices, scale, _ = draw(4, 10, 16, 576, 5)
    assert target(q[:0], kv, lse[:0], indices[:0], scale, None).shape == (0, 5)
    assert torch.equal(target(q, kv[:0], lse, indices, scale, None), torch.zeros(4, 5, device="cuda"))


def test_more_than_two_to_the_31_elements(gpu_memory):
    gpu_memory(60)
    T, H, D = 30000, 128, 576
    q = torch.empty(T, H, D, device="cuda", dtype=torch.bfloat16).normal_()
    assert q.numel() > 2**31
    kv = torch.randn(1000, D, device="cuda").bfloat16()
    indices = torch.randint(0, 1000, (T, 64), device="cuda", dtype=torch.int32)
    lse = torch.full((T, H), 5.0, device="cuda")
    got = target(q, kv, lse, indices, D**-0.5, None)
    for rows in (slice(0, 4), slice(T // 2, T // 2 + 4), slice(T - 4, T)):
        want = reference(q[rows], kv, lse[rows], indices[rows], D**-0.5)
        fused.assert_close(got[rows], want, f"rows {rows}")


def test_what_is_declined():
    q, kv, lse, indices, scale, _ = draw(4, 10, 16, 576, 5)
    reasons = [
        (q.half(), kv.half()),
        (q.float(), kv.float()),
        (q[..., :100], kv[..., :100]),
    ]
    for other_q, other_kv in reasons:
        assert dsa_ops.explain("attention_target", other_q, other_kv, lse, indices, scale).backend == "unfused"
    assert dsa_ops.explain("attention_target", q, kv, lse, indices, scale).backend == "tilelang"
