"""What must hold whatever the numbers are."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import calls
import inputs
from calls import few

SLOTS = ["indexer_scores", "sparse_mla", "attention_target", "indexer_kl"]
PER_SLOT = {"scores", "target", "indices"}
F64 = {"dtype": torch.float64}


@pytest.mark.parametrize("name", SLOTS)
@few
@given(case=inputs.cases(**F64, optional=False))
def test_the_order_of_slots_does_not_matter(name, case):
    args = inputs.arguments(name, case)
    order = torch.randperm(case.K)
    permuted = {n: x[:, order] if n in PER_SLOT else x for n, x in args.items()}
    want = {n: x[:, order] if n in PER_SLOT else x for n, x in calls.run(name, args).items()}
    calls.assert_all_near(calls.run(name, permuted), want)


@pytest.mark.parametrize("name", SLOTS)
@few
@given(case=inputs.cases(**F64, optional=False), more=st.integers(1, 9))
def test_more_empty_slots_change_nothing(name, case, more):
    args = inputs.arguments(name, case)

    def padded(n, x):
        return torch.cat([x, x.new_full((case.T, more), -1 if n == "indices" else 0)], 1) if n in PER_SLOT else x

    found = calls.run(name, {n: padded(n, x) for n, x in args.items()})
    found = {n: x[:, : case.K] if n in PER_SLOT else x for n, x in found.items()}
    calls.assert_all_near(found, calls.run(name, args))


@pytest.mark.parametrize("name", inputs.OPS)
@few
@given(case=inputs.cases(**F64), split=st.integers(0, 6))
def test_splitting_the_rows_changes_nothing(name, case, split):
    args = inputs.arguments(name, case)
    parts = [
        calls.run(name, {n: x[part] if n in calls.ROWS and isinstance(x, torch.Tensor) else x for n, x in args.items()})
        for part in (slice(split), slice(split, None))
    ]
    whole = calls.run(name, args)
    joined = {n: torch.cat([p[n] for p in parts]) if whole[n].dim() else parts[0][n] + parts[1][n] for n in whole}
    sums = {n: joined.pop(n) for n in list(joined) if whole[n].dim() == 0}
    calls.assert_all_equal(joined, {n: whole[n] for n in joined})
    calls.assert_all_near(sums, {n: whole[n] for n in sums})


@pytest.mark.parametrize("name", [n for n in inputs.OPS if n != "indexer_kl"])
@few
@given(case=inputs.cases(**F64), shift=st.integers(1, 300))
def test_shifting_ids_with_the_keys_changes_nothing(name, case, shift):
    """`shift` keys of NaN in front, every id and bound up by as many."""
    args = inputs.arguments(name, case)
    args |= {n: args[n].clamp(0, case.S) for n in ("starts", "ends") if n in args}
    moved = dict(args)
    for n, x in args.items():
        if n in ("starts", "ends"):
            moved[n] = x + shift
        elif n == "indices":
            moved[n] = torch.where(x >= 0, x + shift, x)
        elif n in calls.KEYS:
            moved[n] = torch.cat([x.new_full((shift, *x.shape[1:]), math.nan), x])
    got, want = calls.run(name, moved), calls.run(name, args)
    if "indices" in want:
        got["indices"] = torch.where(got["indices"] >= 0, got["indices"] - shift, -1)
    calls.assert_all_near(got, want)


@few
@given(case=inputs.cases(**F64))
def test_a_key_listed_twice_is_the_key_with_log_2_added(case):
    """An extra column of the keys carries the log 2."""
    args = inputs.arguments("sparse_mla", case, optional=False)
    twice = calls.run("sparse_mla", {**args, "indices": torch.cat([args["indices"], args["indices"][:, :1]], 1)})
    q = torch.cat([args["q"], torch.full((case.T, case.H, 1), 1 / inputs.SCALE, dtype=torch.float64)], -1)
    kv = torch.cat([args["kv"], torch.zeros(case.S, 1, dtype=torch.float64)], -1)
    heavy = torch.cat([args["kv"], torch.full((case.S, 1), math.log(2), dtype=torch.float64)], -1)
    first = args["indices"][:, :1]
    indices = torch.cat([torch.where(first >= 0, first + case.S, first), args["indices"][:, 1:]], 1)
    once = calls.run("sparse_mla", {**args, "q": q, "kv": torch.cat([kv, heavy]), "indices": indices})
    calls.assert_all_near(once, twice)


@few
@given(case=inputs.cases(**F64, total_heads=0))
def test_kl_is_never_negative(case):
    for name in ("indexer_kl", "dense_indexer_kl"):
        assert (calls.run(name, inputs.arguments(name, case))["kl"] >= -1e-12).all()


@few
@given(case=inputs.cases(**F64), factor=st.floats(0.1, 10.0))
def test_target_need_not_be_normalised(case, factor):
    args = inputs.arguments("indexer_kl", case)
    calls.assert_all_near(
        calls.run("indexer_kl", {**args, "target": args["target"] * factor}), calls.run("indexer_kl", args)
    )


@few
@given(case=inputs.cases(**F64, optional=False))
def test_one_head_does_not_see_the_others(case):
    args = inputs.arguments("sparse_mla", case)
    want = calls.run("sparse_mla", args)
    got = calls.run("sparse_mla", {**args, "q": args["q"][:, -1:]})
    calls.assert_all_near(got, {n: x[:, -1:] for n, x in want.items()})


@few
@given(case=inputs.cases(**F64))
def test_scores_again_at_the_selected_ids_are_the_selected_scores(case):
    args = inputs.arguments("indexer_topk", case)
    indices, scores = calls.run("indexer_topk", args).values()
    again = calls.op("indexer_scores")(args["q"], args["k"], args["weights"], indices, args["relu"])
    calls.assert_near(again, scores)


@few
@given(case=inputs.cases(**F64, exact=True))
def test_a_wider_selection_holds_the_narrower(case):
    args = inputs.arguments("indexer_topk", case)
    narrow, wide = (calls.run("indexer_topk", {**args, "topk": k})["indices"] for k in (case.K, case.K + 3))
    for a, b in zip(narrow.tolist(), wide.tolist(), strict=True):
        assert set(a) - {-1} <= set(b)
