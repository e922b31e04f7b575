"""Exact selection: the K best visible keys, ties to the lower id, NaN first, ids ascending. Bit for bit."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import calls
import inputs
import oracle
from calls import few


def select(scores, topk, starts=None, ends=None, device="cpu"):
    """indexer_topk on keys whose scores are exactly `scores`: [S] for one row, [T, S] for T."""
    scores = torch.as_tensor(scores, dtype=torch.float32)
    scores = scores[None] if scores.dim() == 1 else scores
    T, S = scores.shape
    q = torch.eye(T)[:, None] if T > 1 else torch.ones(1, 1, 1)
    starts = torch.zeros(T, dtype=torch.int32) if starts is None else torch.tensor(starts, dtype=torch.int32)
    ends = torch.full((T,), S, dtype=torch.int32) if ends is None else torch.tensor(ends, dtype=torch.int32)
    args = (q, scores.T.contiguous(), torch.ones(T, 1), starts, ends)
    return calls.op("indexer_topk")(*(x.to(device) for x in args), topk, False)


def expected(scores, topk, start=0, end=None):
    scores = torch.as_tensor(scores, dtype=torch.float32)
    ids = list(range(start, len(scores) if end is None else end))
    kept = sorted(ids[i] for i in oracle.order(scores[ids], ids)[:topk])
    return kept + [-1] * (topk - len(kept))


def assert_selects(scores, topk, device="cpu"):
    indices, values = select(scores, topk, device=device)
    want = expected(scores, topk)
    assert indices[0].tolist() == want
    given = torch.as_tensor(scores, dtype=torch.float32)[[s for s in want if s >= 0]]
    torch.testing.assert_close(values[0, : len(given)].cpu(), given, rtol=0, atol=0, equal_nan=True)
    assert (values[0, len(given) :] == -torch.inf).all()


SUBNORMAL = 2.0**-149
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, SUBNORMAL, -SUBNORMAL, 2 * SUBNORMAL, 1.0, -1.0, 3.4e38, -3.4e38]


@pytest.mark.parametrize("topk", [1, 2, 3, 31, 64, 99, 100, 101, 130])
@pytest.mark.parametrize(
    "scores",
    [
        pytest.param([0.0] * 100, id="all zero"),
        pytest.param([-3.0] * 100, id="all equal and negative"),
        pytest.param([0.0, -0.0] * 50, id="signed zeros"),
        pytest.param([-math.inf] * 100, id="all -inf"),
        pytest.param([math.inf] * 99 + [math.nan], id="one NaN among infinities"),
        pytest.param([math.nan] * 100, id="all NaN"),
        pytest.param([1.0 + (i % 3) * 2**-23 for i in range(100)], id="one ulp apart"),
        pytest.param([-1.0 - i for i in range(100)], id="descending negative"),
        pytest.param([(i * 37 % 10) * SUBNORMAL for i in range(100)], id="subnormal"),
        pytest.param((SPECIAL * 9)[:100], id="every special value"),
        pytest.param([-math.inf] * 50 + [-3.4e38] * 50, id="-inf last but selected"),
    ],
)
def test_ties_and_special_values(scores, topk, device):
    assert_selects(scores, topk, device)


@few
@given(
    scores=st.lists(st.sampled_from([*SPECIAL, 2.0, 2.0 + 2**-22]), min_size=1, max_size=60), topk=st.integers(1, 70)
)
def test_any_mix_of_special_values(scores, topk):
    assert_selects(scores, topk)


@few
@given(case=inputs.cases(exact=True, S=40), dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_small_integers_select_as_the_oracle_says(case, dtype):
    """Thousands of ties: few distinct scores, relu zeros, negative weights, any bounds, any layout."""
    args = inputs.arguments("indexer_topk", case, dtype=dtype)
    want = calls.reference("indexer_topk", args)
    got = calls.run("indexer_topk", args)
    assert torch.equal(got["indices"], want["indices"]) and torch.equal(got["scores"].double(), want["scores"])


def test_low_contrast(device):
    """60000 keys one float32 step apart from 1 on, from parts that bfloat16 holds: they share their upper 16 bits."""
    S, topk = 60000, 2048
    rank = torch.randperm(S)
    k = torch.stack([torch.ones(S), (rank // 256).float(), (rank % 256).float()], 1).to(device, torch.bfloat16)
    q = torch.tensor([[[1.0, 2.0**-15, 2.0**-23]]], device=device).to(torch.bfloat16)
    bounds = torch.tensor([0], dtype=torch.int32, device=device), torch.tensor([S], dtype=torch.int32, device=device)
    indices, _ = calls.op("indexer_topk")(q, k, torch.ones(1, 1, device=device), *bounds, topk)
    assert torch.equal(indices[0].cpu().long(), (rank >= S - topk).nonzero()[:, 0])


@pytest.mark.parametrize("S", [4096, 20000])
def test_many_equal_scores(S, device):
    """More ties at the edge than any buffer holds: the lower ids win."""
    scores = torch.ones(S)
    scores[S // 2 :: 7] = 2.0
    indices, _ = select(scores, 2048, device=device)
    above = (scores > 1).nonzero()[:, 0]
    ties = (scores == 1).nonzero()[:, 0][: max(2048 - len(above), 0)]
    assert torch.equal(
        indices[0].cpu().long(), torch.cat([above, ties]).sort().values[:2048] if len(above) <= 2048 else above[:2048]
    )


@pytest.mark.parametrize("S", [1, 63, 64, 65, 127, 129, 191])
def test_no_filler_wins_over_negative_scores(S, device):
    k, q = torch.randn(S, 4, device=device), torch.randn(S, 2, 4, device=device)
    weights = -torch.rand(S, 2, device=device) - 0.1
    starts, ends = (
        torch.zeros(S, dtype=torch.int32, device=device),
        torch.arange(1, S + 1, dtype=torch.int32, device=device),
    )
    indices, scores = calls.op("indexer_topk")(q, k, weights, starts, ends, 64)
    for t in range(S):
        ids = [s for s in indices[t].tolist() if s >= 0]
        assert len(ids) == len(set(ids)) == min(64, t + 1) and ids == sorted(ids) and max(ids) <= t
    assert (scores[indices >= 0] <= 0).all() and torch.equal(scores == -torch.inf, indices < 0)


@pytest.mark.parametrize("topk", [1, 2, 3, 7, 31, 33, 63, 65, 89, 90, 91])
def test_odd_widths(topk, device):
    scores = torch.randn(3, 90)
    ends = [90, 40, 7]
    indices, _ = select(scores, topk, ends=ends, device=device)
    assert indices.tolist() == [expected(scores[t], topk, 0, ends[t]) for t in range(3)]


def test_windows_that_begin_and_end_anywhere(device):
    scores = torch.randn(4, 200)
    starts, ends = [3, 65, 130, 199], [5, 129, 131, 200]
    indices, values = select(scores, 80, starts, ends, device)
    assert indices.tolist() == [expected(scores[t], 80, starts[t], ends[t]) for t in range(4)]
    assert torch.equal(values == -torch.inf, indices < 0)


@pytest.mark.parametrize(("T", "S"), [(0, 5), (5, 0), (0, 0)])
def test_no_rows_or_no_keys(T, S, device):
    args = inputs.arguments("indexer_topk", T=T, S=S, device=device)
    got = calls.run("indexer_topk", args)
    assert got["indices"].shape == got["scores"].shape == (T, 4)
    assert (got["indices"] == -1).all() and (got["scores"] == -torch.inf).all()


def test_weights_below_bfloat16_resolution_decide(device):
    """Weights are used in float32: 1 + 2^-10 rounds to 1 in bfloat16."""
    q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], device=device).bfloat16()
    k = torch.tensor([[0.0, 1.0], [1.0, 0.0]], device=device).bfloat16()  # key 1 meets head 0, key 0 meets head 1
    weights = torch.tensor([[1 + 2.0**-10, 1.0]], device=device)
    bounds = torch.zeros(1, dtype=torch.int32, device=device), torch.full((1,), 2, dtype=torch.int32, device=device)
    assert calls.op("indexer_topk")(q, k, weights, *bounds, 1)[0].tolist() == [[1]]


def test_one_nan_query_keeps_ids_in_range(device):
    args = inputs.arguments("indexer_topk", device=device)
    args["q"][2], args["k"][3] = math.nan, math.nan
    indices = calls.run("indexer_topk", args)["indices"]
    for t in range(7):
        ids = [s for s in indices[t].tolist() if s >= 0]
        seen = oracle.visible(args["starts"], args["ends"], t, 9)
        assert len(ids) == len(set(ids)) == min(4, len(seen)) and set(ids) <= set(seen)
        assert 3 in ids or 3 not in seen


def test_later_keys_do_not_matter(device):
    args = inputs.arguments("indexer_topk", T=8, S=8, device=device)
    args["starts"], args["ends"] = (
        torch.zeros_like(args["starts"]),
        torch.arange(1, 9, dtype=torch.int32, device=device),
    )
    before = calls.run("indexer_topk", args)["indices"]
    after = calls.run("indexer_topk", {**args, "k": torch.cat([args["k"][:5], args["k"][5:] + 100])})["indices"]
    assert torch.equal(before[:5], after[:5])
