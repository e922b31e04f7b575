"""The oracle against torch's own functions and against numbers worked out by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

import inputs
import oracle

CAUSAL = torch.zeros(6, dtype=torch.int32), torch.arange(1, 7, dtype=torch.int32)


def causal_case(name, **changes):
    args = inputs.arguments(name, T=6, S=6, dtype=torch.float64, **changes)
    return args | {n: b for n, b in zip(("starts", "ends"), CAUSAL, strict=True) if n in args}


def test_sparse_mla_over_all_keys_is_causal_attention():
    a = causal_case("sparse_mla", optional=False)
    a["indices"] = torch.arange(6, dtype=torch.int32).repeat(6, 1).masked_fill(torch.ones(6, 6).triu(1).bool(), -1)
    out, lse = oracle.sparse_mla(**a)
    q, k = a["q"].transpose(0, 1), a["kv"].expand(3, 6, 8)
    want = F.scaled_dot_product_attention(q, k, k[..., :5], is_causal=True, scale=inputs.SCALE)
    torch.testing.assert_close(out, want.transpose(0, 1))
    torch.testing.assert_close(lse, inputs.dense_lse(a["q"], a["kv"], *CAUSAL, inputs.SCALE))


def test_sink_only_shrinks_the_output():
    a = inputs.arguments("sparse_mla", dtype=torch.float64)
    (out, lse), (bare, same) = oracle.sparse_mla(**a), oracle.sparse_mla(**{**a, "sink": None})
    assert torch.equal(lse, same)
    torch.testing.assert_close(out, bare * (lse - torch.logaddexp(lse, a["sink"])).exp()[..., None])


def test_topk_is_torch_topk_when_there_are_no_ties():
    a = causal_case("indexer_topk", relu=False, K=3)
    indices, scores = oracle.indexer_topk(**a)
    dense = torch.einsum("th,ths->ts", a["weights"], a["q"] @ a["k"].T)
    for t in range(6):
        kept = dense[t, : t + 1].topk(min(3, t + 1)).indices.sort().values
        assert indices[t].tolist() == kept.tolist() + [-1] * (3 - len(kept))
        torch.testing.assert_close(scores[t, : len(kept)], dense[t, kept])
    assert torch.equal(scores == -math.inf, indices < 0)


def test_order_of_the_contract():
    scores = torch.tensor([-0.0, 1.0, math.nan, 0.0, -math.inf, math.inf, math.nan, 1.0])
    assert oracle.order(scores, list(range(8))) == [2, 6, 5, 1, 7, 0, 3, 4]


def test_scores_at_the_selected_ids_are_the_selected_scores():
    a = inputs.arguments("indexer_topk", dtype=torch.float64)
    indices, scores = oracle.indexer_topk(**a)
    assert torch.equal(oracle.indexer_scores(a["q"], a["k"], a["weights"], indices), scores)


def test_target_of_attention_over_the_same_keys_sums_to_the_number_of_heads():
    a = inputs.arguments("attention_target", dtype=torch.float64, optional=False)
    target = oracle.attention_target(**a).sum(-1)
    torch.testing.assert_close(target, torch.where((a["indices"] >= 0).any(-1), 3.0, 0.0).double())


def test_kl_is_kl_div_and_its_gradient_is_p_minus_t():
    a = inputs.arguments("indexer_kl", T=2, dtype=torch.float64)
    a["indices"] = a["indices"].abs()
    a["scores"] = torch.randn(2, 4, dtype=torch.float64)
    share, log_p = a["target"] / a["target"].sum(-1, keepdim=True), a["scores"].log_softmax(-1)
    torch.testing.assert_close(oracle.indexer_kl(**a), F.kl_div(log_p, share, reduction="none").sum(-1))
    grad = oracle.backward(oracle.indexer_kl, a, [torch.ones(2)], ["scores"])["scores"]
    torch.testing.assert_close(grad, log_p.exp() - share)


def test_dense_kl_over_all_keys_is_the_sparse_kl_over_a_list_of_all_keys():
    a = causal_case("dense_indexer_kl", K=6)
    a["lse"] = inputs.dense_lse(a["q"], a["k"], *CAUSAL, inputs.SCALE)
    indices = torch.arange(6, dtype=torch.int32).repeat(6, 1).masked_fill(torch.ones(6, 6).triu(1).bool(), -1)
    scores = oracle.indexer_scores(a["index_q"], a["index_k"], a["index_weights"], indices)
    target = oracle.attention_target(a["q"], a["k"], a["lse"], indices, inputs.SCALE)
    loss, kl = oracle.dense_indexer_kl(**a)
    torch.testing.assert_close(kl, oracle.indexer_kl(target, scores, indices))
    torch.testing.assert_close(loss, (a["row_weight"] * kl).sum())


def test_gradients_of_head_shards_add_up():
    a = causal_case("dense_indexer_kl", H=4, wide=True)
    a["lse"] = inputs.dense_lse(a["q"], a["k"], *CAUSAL, inputs.SCALE)
    names, one = ["index_q", "index_k", "index_weights"], [torch.ones(()), None]
    whole = oracle.backward(oracle.dense_indexer_kl, a, one, names)
    halves = [
        oracle.backward(
            oracle.dense_indexer_kl,
            {**a, "q": a["q"][:, h], "lse": a["lse"][:, h], "total_heads": 4},
            one,
            names,
        )
        for h in (slice(2), slice(2, 4))
    ]
    for n in names:
        torch.testing.assert_close(halves[0][n] + halves[1][n], whole[n])


@pytest.mark.parametrize("name", inputs.OPS)
@pytest.mark.parametrize("case", inputs.CASES)
def test_every_case_can_be_built_and_evaluated(name, case):
    outputs = getattr(oracle, name)(**inputs.arguments(name, inputs.CASES[case]))
    assert len(outputs if isinstance(outputs, tuple) else (outputs,)) == len(inputs.OPS[name].outputs)


@pytest.mark.parametrize("name", inputs.BACKWARDS)
@pytest.mark.parametrize("case", inputs.CASES)
def test_every_backward_case_can_be_built(name, case):
    args = inputs.arguments(name, inputs.CASES[case])
    assert all(x.isfinite().all() for n, x in args.items() if n.startswith("grad_"))


def test_an_id_past_the_keys_is_an_error_unless_its_slot_is_empty():
    a = inputs.arguments("sparse_mla", optional=False)
    a["indices"][0, -1] = 9
    with pytest.raises(IndexError):
        oracle.sparse_mla(**a)
    oracle.sparse_mla(**{**a, "topk_length": torch.full((7,), 3)})
