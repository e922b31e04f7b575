"""dsa::indexer_topk fused: scores against float64, an exact selection of the best of them."""

import math

import pytest
import torch

import fused

pytestmark = pytest.mark.gpu
op = torch.ops.dsa.indexer_topk

NAN, INF = math.nan, math.inf
CUDA = torch.device("cuda")


def draw(T, S, Hi=64, Di=128, wide=True, integers=False):
    """q, k and weights: random, or small integers whose scores are exact in float32, with many ties."""

    def floats(*shape, dtype=torch.bfloat16):
        if integers:
            return torch.randint(-2, 3, shape, device=CUDA).to(dtype)
        return torch.randn(shape, device=CUDA).to(dtype)

    return floats(T, Hi, Di), floats(S, Di), floats(T, Hi, dtype=torch.float32 if wide else torch.bfloat16)


def int32(values):
    return torch.as_tensor(values, dtype=torch.int32, device=CUDA)


def causal(T):
    return int32([0] * T), torch.arange(1, T + 1, dtype=torch.int32, device=CUDA)


def random_bounds(T, S):
    """Any bounds: beyond [0, S], empty, the wrong way round."""
    starts = torch.randint(-S // 4 - 1, S + 2, (T,), dtype=torch.int32, device=CUDA)
    ends = starts + torch.randint(-S // 8 - 1, S + S // 4 + 2, (T,), dtype=torch.int32, device=CUDA)
    whole = torch.rand(T, device=CUDA) < 0.3
    return starts.masked_fill(whole, -3), ends.masked_fill(whole, S + 5)


def visible(starts, ends, S):
    ids = torch.arange(S, device=CUDA)
    return (ids >= starts[:, None]) & (ids < ends[:, None])


def truth(q, k, weights, relu):
    """Scores [T, S] in float64, and for each the sum of the sizes of its terms: what rounding is measured by."""
    score, size = [], []
    rows = max(1, (1 << 28) // (8 * q.shape[1] * max(1, k.shape[0])))
    for i in range(0, max(1, q.shape[0]), rows):
        dots = q[i : i + rows].double() @ k.double().T
        terms = (dots.relu() if relu else dots) * weights[i : i + rows].double()[..., None]
        score.append(terms.sum(1))
        size.append(terms.abs().sum(1))
    return torch.cat(score), torch.cat(size)


def best(scores, seen, topk):
    """The contract's choice among `scores` [T, S]: indices [T, topk]."""
    order = scores.double().add(0.0).argsort(dim=1, descending=True, stable=True)  # -0.0 + 0.0 is 0.0; NaN comes first
    order = order.gather(1, seen.gather(1, order).byte().argsort(dim=1, descending=True, stable=True))[:, :topk]
    ids = order.masked_fill(~seen.gather(1, order), scores.shape[1]).sort(1).values
    ids = ids.masked_fill(ids == scores.shape[1], -1).int()
    return torch.nn.functional.pad(ids, (0, topk - ids.shape[1]), value=-1)


def gathered(scores, indices):
    found = scores.gather(1, indices.clamp(min=0).long()) if scores.shape[1] else scores.new_zeros(indices.shape)
    return found.masked_fill(indices < 0, -INF)


def check(q, k, weights, starts, ends, topk, relu):
    """Runs the fused op and compares it with float64. Returns its indices and scores."""
    with fused.fused():
        indices, scores = op(q, k, weights, starts, ends, topk, relu)
    assert indices.dtype == torch.int32 and scores.dtype == torch.float32
    assert indices.shape == scores.shape == (q.shape[0], topk)
    assert indices.is_contiguous() and scores.is_contiguous()
    seen = visible(starts, ends, k.shape[0])
    chosen = indices >= 0
    assert torch.equal(chosen.sum(1), seen.sum(1).clamp(max=topk)), "number of selected keys"
    assert torch.equal(chosen, torch.arange(topk, device=CUDA) < chosen.sum(1, keepdim=True)), "a prefix"
    assert (indices[:, 1:] > indices[:, :-1])[chosen[:, 1:]].all(), "ascending"
    exact, size = truth(q, k, weights, relu)
    assert gathered(seen, indices)[chosen].all() if k.shape[0] else not chosen.any(), "visible"
    fused.assert_close(scores, gathered(exact, indices), "scores")
    if k.shape[0] and chosen.any():
        # whoever is left out is no better than the worst selected, by more than the rounding of both
        rounding = 2e-6 * size.masked_fill(~seen, 0).amax(1)
        left_out = _left_out(seen, indices)
        worst = gathered(exact, indices).masked_fill(~chosen, INF).amin(1)
        over = exact.masked_fill(~left_out, -INF).amax(1) - worst
        assert (over <= 2 * rounding)[chosen.any(1)].all(), f"a better key was left out: {over.max().item()}"
    return indices, scores


def _left_out(seen, indices):
    taken = torch.zeros(seen.shape[0], seen.shape[1] + 1, dtype=torch.bool, device=CUDA)
    taken.scatter_(1, indices.masked_fill(indices < 0, seen.shape[1]).long(), True)
    return seen & ~taken[:, :-1]


@pytest.mark.parametrize("seed", range(40))
def test_random_sizes(seed, poisoned):
    """The whole supported set: heads, widths, dtype of the weights, sizes from one to tens of thousands, any bounds."""
    torch.manual_seed(seed)
    Hi, Di = (4, 8, 16, 32, 64)[seed % 5], (64, 128)[seed // 5 % 2]
    S = int(2 ** (torch.rand(()) * 15.5))
    T = int(2 ** (torch.rand(()) * math.log2(max(2, min(20_000, 8_000_000 // (S + Hi * Di))))))
    topk = int(2 ** (torch.rand(()) * 11.2))
    q, k, weights = draw(T, S, Hi, Di, wide=seed % 3 > 0)
    q, k, weights = (fused.guarded(x) for x in (q, k, weights))
    starts, ends = (fused.guarded(x) for x in random_bounds(T, S))
    check(q, k, weights, starts, ends, topk, relu=seed % 4 != 1)


@pytest.mark.parametrize("Hi, Di", [(4, 64), (8, 128), (16, 64), (32, 128), (64, 128)])
@pytest.mark.parametrize("relu", [True, False])
def test_small_integers_equal_unfused_bit_for_bit(Hi, Di, relu):
    """Scores are exact in float32 and take few values: thousands of ties at the last selected score."""
    T, S, topk = 300, 3001, 512
    args = *draw(T, S, Hi, Di, integers=True), *random_bounds(T, S), topk, relu
    with fused.fused():
        indices, scores = op(*args)
    with fused.unfused():
        other_indices, other_scores = op(*args)
    assert torch.equal(indices, other_indices) and torch.equal(scores, other_scores)
    exact, _ = truth(*args[:3], relu)
    assert torch.equal(indices, best(exact, visible(*args[3:5], S), topk))
    assert torch.equal(scores.double(), gathered(exact, indices))


def select(scores, topk, starts=None, ends=None):
    """The op on keys whose scores are exactly `scores` [S]: a few values times powers of two that bfloat16 holds."""
    S = len(scores)
    k = torch.zeros(S, 64, dtype=torch.bfloat16, device=CUDA)
    k[:, 0] = scores
    q = torch.zeros(1, 4, 64, dtype=torch.bfloat16, device=CUDA)
    q[0, 0, 0] = 1
    weights = torch.tensor([[1.0, 0.0, 0.0, 0.0]], device=CUDA)
    starts, ends = int32([0 if starts is None else starts]), int32([S if ends is None else ends])
    with fused.fused():
        indices, values = op(q, k, weights, starts, ends, topk, False)
    want = best(scores[None], visible(starts, ends, S), topk)
    assert torch.equal(indices, want)
    torch.testing.assert_close(values, gathered(k[:, 0].float()[None], indices), rtol=0, atol=0, equal_nan=True)


S = 9000
DISTRIBUTIONS = {
    "all zero": lambda: torch.zeros(S),
    "signed zeros": lambda: torch.zeros(S).copysign(torch.randn(S)),
    "all equal": lambda: torch.full((S,), -3.0),
    "two values": lambda: torch.randint(0, 2, (S,)) * 1.0,
    "one bin": lambda: 1 + torch.randint(0, 2, (S,)) / 128,
    "many powers": lambda: 2.0 ** torch.randint(-100, 100, (S,)) * torch.randn(S).sign(),
    "ascending": lambda: torch.arange(S).float().bfloat16().float(),
    "descending": lambda: -torch.arange(S).float().bfloat16().float(),
}


@pytest.mark.parametrize("topk", [1, 2, 31, 2048, 4097, 8999, 9000, 9001])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_adversarial_distributions(distribution, topk):
    scores = DISTRIBUTIONS[distribution]().to(CUDA)
    select(scores, topk)
    select(scores, topk, starts=1, ends=S - 2)
    select(scores, topk, starts=4003, ends=4003 + min(topk + 1, 4990))


@pytest.mark.parametrize("topk", [1, 50, 700, 1999, 3000])
@pytest.mark.parametrize("special", [NAN, INF, -INF])
def test_special_scores(special, topk):
    """NaN first, then +inf; -inf last but selected. They come from the keys: 0 * inf in another head would be NaN."""
    T, S = 5, 2000
    q = torch.ones(T, 4, 64, dtype=torch.bfloat16, device=CUDA)
    k = torch.randint(-3, 4, (S, 64), device=CUDA).bfloat16()
    weights = torch.randint(1, 4, (T, 4), device=CUDA).float()
    k[torch.rand(S, device=CUDA) < 0.4, 7] = special
    starts, ends = int32([0, 1, 2, 500, 1999]), int32([S, S - 1, 700, 1500, S])
    for relu in (True, False):
        with fused.fused():
            indices, scores = op(q, k, weights, starts, ends, topk, relu)
        exact, _ = truth(q, k, weights, relu)
        assert torch.equal(indices, best(exact, visible(starts, ends, S), topk))
        torch.testing.assert_close(scores.double(), gathered(exact, indices), rtol=0, atol=0, equal_nan=True)


def test_subnormal_scores():
    """Weights so small that every score is subnormal: not flushed to zero."""
    T, S, topk = 9, 3000, 700
    q, k, _ = draw(T, S, 8, 64, integers=True)
    weights = torch.randint(-3, 4, (T, 8), device=CUDA) * 2.0**-149
    args = q, k, weights, *random_bounds(T, S), topk, True
    with fused.fused():
        indices, scores = op(*args)
    exact, _ = truth(q, k, weights, True)
    assert exact.abs().max() < 2.0**-126 and exact.any()
    assert torch.equal(indices, best(exact, visible(*args[3:5], S), topk))
    assert torch.equal(scores.double(), gathered(exact, indices))


@pytest.mark.parametrize("Hi, Di", [(64, 128), (16, 64)])
def test_bits_depend_on_nothing_else(Hi, Di, monkeypatch):
    """The same bits from run to run, for any workspace, and for a row alone or among fewer others."""
    T, S, topk = 777, 5003, 300
    q, k, weights = draw(T, S, Hi, Di)
    starts, ends = random_bounds(T, S)
    with fused.fused():
        want = op(q, k, weights, starts, ends, topk)
        for megabytes in (None, "0.001", "0.7", "3"):
            if megabytes:
                monkeypatch.setenv("DSA_OPS_WORKSPACE_MB", megabytes)
            for got, expected in zip(op(q, k, weights, starts, ends, topk), want, strict=True):
                assert torch.equal(got, expected), f"{megabytes} MiB"
        for rows in (slice(0, 1), slice(5, 6), slice(776, 777), slice(3, 400)):
            some = op(q[rows], k, weights[rows], starts[rows], ends[rows], topk)
            for got, expected in zip(some, want, strict=True):
                assert torch.equal(got, expected[rows]), f"rows {rows}"


def test_workspace_is_bounded(monkeypatch):
    T = S = 8192
    q, k, weights = draw(T, S, 16, 64)
    starts, ends = causal(T)
    for megabytes, allowed in (("16", 16), (None, 1024)):
        monkeypatch.delenv("DSA_OPS_WORKSPACE_MB", raising=False)
        if megabytes:
            monkeypatch.setenv("DSA_OPS_WORKSPACE_MB", megabytes)
        with fused.fused():
            op(q, k, weights, starts, ends, 64)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            results = op(q, k, weights, starts, ends, 64)
            extra = torch.cuda.max_memory_allocated() - before - sum(x.numel() * 4 for x in results)
        assert extra <= allowed << 20, f"{extra >> 20} MiB with {allowed} MiB allowed"


@pytest.mark.parametrize("megabytes", ["0", "-1", "nan", "many"])
def test_a_bad_workspace_is_refused(megabytes, monkeypatch):
    monkeypatch.setenv("DSA_OPS_WORKSPACE_MB", megabytes)
    with fused.fused(), pytest.raises(ValueError, match="DSA_OPS_WORKSPACE_MB must be a positive number of MiB"):
        op(*draw(4, 9, 4, 64), *causal(4), 3)


@pytest.mark.parametrize("T, S, topk", [(0, 5, 3), (5, 0, 3), (0, 0, 1), (1, 1, 1), (1, 1, 9), (7, 3, 5)])
def test_smallest_sizes(T, S, topk, poisoned):
    check(*draw(T, S, 8, 64), int32([0] * T), int32([S] * T), topk, True)


def test_rows_that_see_nothing(poisoned):
    T, S = 131, 640
    starts, ends = int32([5] * T), int32([5] * T)
    starts[::3], ends[::3] = 600, 2
    starts[1::3], ends[1::3] = 9000, 9100
    indices, scores = check(*draw(T, S, 4, 64), starts, ends, 17, True)
    assert (indices == -1).all() and (scores == -INF).all()


def test_unseen_keys_and_other_rows_may_hold_anything():
    """NaN in every key that no row sees, and in queries and weights of rows that see nothing."""
    T, S, topk = 300, 2000, 100
    q, k, weights = draw(T, S, 16, 64)
    starts, ends = int32([700] * T), int32([1500] * T)
    ends[::5] = 0
    expected = check(q, k, weights, starts, ends, topk, True)
    k[:700], k[1500:] = NAN, NAN
    q[::5], weights[::5] = NAN, NAN
    with fused.fused():
        got = op(q, k, weights, starts, ends, topk)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_packed_sequences():
    """Rows of several sequences share a block; each sees its own alone, and gets what it gets alone."""
    lengths = [1, 700, 3, 129, 64, 1000, 127]
    T, topk = sum(lengths), 96
    q, k, weights = draw(T, T, 32, 128)
    first = torch.repeat_interleave(int32([0, *lengths[:-1]]).cumsum(0), int32(lengths).long()).int()
    indices, scores = check(q, k, weights, first, torch.arange(1, T + 1, device=CUDA).int(), topk, True)
    start = sum(lengths[:5])
    rows = slice(start, start + lengths[5])
    with fused.fused():
        alone = op(q[rows], k[rows], weights[rows], *causal(lengths[5]), topk)
    assert torch.equal(torch.where(indices[rows] < 0, -1, indices[rows] - start), alone[0])
    torch.testing.assert_close(scores[rows], alone[1], rtol=1e-5, atol=1e-4)


def test_strided_inputs(poisoned):
    T, S, topk = 100, 900, 64
    q, k, weights = draw(T, S, 16, 64)
    starts, ends = random_bounds(T, S)
    want = check(q, k, weights, starts, ends, topk, True)
    strided = (
        torch.stack([q, q], 1)[:, 1],
        torch.cat([k, k], 1)[:, 64:],
        weights.T.contiguous().T,
        torch.stack([starts, starts], 1)[:, 0],
        ends.repeat(2)[T:],
    )
    shifted = torch.empty(k.numel() + 1, dtype=k.dtype, device=CUDA)[1:].view(k.shape)
    shifted.copy_(k)
    with fused.fused():
        for args in (strided, (q, shifted, weights, starts, ends)):
            got = op(*args, topk)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_gradients_of_a_fused_forward():
    """Forward fused, backward unfused: what the unfused op gives on the same selection."""
    T, topk = 200, 40
    q, k, weights = (x.requires_grad_() for x in draw(T, T, 16, 64, integers=True))
    grad = torch.randint(-2, 3, (T, topk), device=CUDA).float()

    def gradients(forward):
        with forward:
            scores = op(q, k, weights, *causal(T), topk)[1]
        with fused.unfused():
            return torch.autograd.grad(scores.where(scores > -INF, 0), (q, k, weights), grad)

    for got, want in zip(gradients(fused.fused()), gradients(fused.unfused()), strict=True):
        torch.testing.assert_close(got, want)


def test_graph_capture_and_replay():
    T, topk = 500, 33
    q, k, weights = draw(T, T, 8, 64)
    starts, ends = causal(T)
    with fused.fused():
        op(q, k, weights, starts, ends, topk)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = op(q, k, weights, starts, ends, topk)
        q.copy_(torch.randn_like(q))
        ends.copy_(torch.full_like(ends, T))
        graph.replay()
        want = op(q, k, weights, starts, ends, topk)
    assert torch.equal(captured[0], want[0]) and torch.equal(captured[1], want[1])


def test_large():
    """Lengths at which a workspace has many chunks and rows do not fit L2; some rows are compared with float64."""
    T = S = 20_000
    topk = 2048
    q, k, weights = draw(T, S)
    starts, ends = causal(T)
    with fused.fused():
        indices, scores = op(q, k, weights, starts, ends, topk)
    rows = torch.randint(0, T, (24,), device=CUDA)
    got = check(q[rows], k, weights[rows], starts[rows], ends[rows], topk, True)
    assert torch.equal(got[0], indices[rows]) and torch.equal(got[1], scores[rows])
    counts = (indices >= 0).sum(1)
    assert torch.equal(counts, ends.clamp(max=topk).long())
