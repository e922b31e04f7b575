"""Index scores and their windows: what other implementations got wrong."""

import pytest
import torch

import calls
import dsa_ops
import inputs
import steps


def dense_scores(args):
    """[T, S] in float64."""
    products = torch.einsum("thd,sd->ths", args["q"].detach().double(), args["k"].detach().double()).relu()
    return torch.einsum("th,ths->ts", args["weights"].detach().double(), products)


def test_selection_well_below_the_length_is_that_of_the_dense_scores(device):
    """huggingface/transformers#46842, ml-explore/mlx-lm#1431, sgl-project/sglang#13530: a wrong score is invisible
    while topk covers the context, because then nothing is dropped. 16 heads, so that relu leaves no ties at 0."""
    T = 64
    args = steps.arguments("indexer_topk", **steps.causal(T, device), T=T, S=T, K=T // 4, Hi=16, Di=32, device=device)
    indices = calls.run("indexer_topk", args)["indices"].cpu()
    for t, row in enumerate(dense_scores(args).cpu()):
        want = row[: t + 1].topk(min(T // 4, t + 1)).indices.sort().values
        assert torch.equal(indices[t][indices[t] >= 0].long(), want)


def test_nothing_of_a_row_depends_on_later_keys(device):
    """huggingface/transformers#45820: an indexer without a causal bound picks keys of the future. Values, gradients
    and both losses of the rows before are the same bit for bit."""
    T, cut = 24, 15
    index, mla = (steps.arguments(n, T=T, S=T, K=6, device=device) for n in ("indexer_topk", "sparse_mla"))
    dense_lse = inputs.dense_lse(
        mla["q"].detach().cpu(), mla["kv"].detach().cpu(), *steps.causal(T).values(), 0.3
    ).float()

    def everything(changed):
        leaves = {n: x.detach().clone() for n, x in index.items() if n in ("q", "k", "weights")}
        kv = mla["kv"].detach().clone()
        if changed:
            leaves["k"][cut:] = leaves["k"][cut:] * -3 + 100
            kv[cut:] *= 7
        for x in (*leaves.values(), kv):
            x.requires_grad_()
        q = mla["q"].detach().clone().requires_grad_()
        indices, scores = dsa_ops.indexer_topk(*leaves.values(), topk=6)
        out, lse = dsa_ops.sparse_mla(q, kv, indices, 0.3, 5)
        target = dsa_ops.attention_target(q.detach(), kv.detach(), lse.detach(), indices, 0.3)
        kl = dsa_ops.indexer_kl(target, scores, indices)
        dense = dsa_ops.dense_indexer_kl(
            *leaves.values(), q.detach(), kv.detach(), dense_lse.to(device), softmax_scale=0.3
        )
        (out[:cut].sum() + kl[:cut].sum()).backward()
        early = [indices, scores, out, lse, target, kl, dense.kl, q.grad, leaves["q"].grad, leaves["weights"].grad]
        return [x[:cut].detach() for x in early], [leaves["k"].grad, kv.grad]

    (before, keys), (after, moved) = everything(False), everything(True)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(calls.bits(a), calls.bits(b))
    for a, b in zip(keys, moved, strict=True):
        assert not b[cut:].any()
        calls.assert_near(a, b)


@pytest.mark.parametrize("heads", [1, 2, 4, 16, 32])
def test_limits_hold_row_by_row_for_every_number_of_index_heads(heads, device):
    """NVIDIA/cudnn-frontend#388: with few heads one block held 8 query rows, and the limit of one was used for all."""
    T, K = 130, 64
    args = steps.arguments("indexer_topk", **steps.causal(T, device), T=T, S=T, K=K, Hi=heads, Di=8, device=device)
    indices, scores = calls.run("indexer_topk", args).values()
    valid, last = indices >= 0, torch.arange(T, device=device)[:, None]
    assert (indices <= last).all() and torch.equal(valid.sum(1), (last[:, 0] + 1).clamp(max=K))
    assert torch.equal(scores == -torch.inf, ~valid)
    dense = dense_scores(args)
    calls.assert_near(scores[valid], dense.gather(1, indices.clamp(min=0).long())[valid])


def test_a_window_that_ends_inside_a_tile_leaves_no_score_behind(device):
    """NVIDIA/cudnn-frontend#1154: masked places of a visited tile kept finite scores, so a softmax over what came
    back counted keys that nobody may see."""
    args = steps.arguments(
        "indexer_topk", **steps.bounds([3, 65, 130, 255], [5, 129, 131, 258], device), T=4, S=600, K=80, device=device
    )
    found = steps.check("indexer_topk", args)
    p = found["scores"].softmax(-1)
    assert not p[found["indices"] < 0].any()
    for t in range(4):
        seen = dense_scores(args)[t, args["starts"][t] : args["ends"][t]]
        calls.assert_near(found["scores"][t].logsumexp(0), seen.topk(min(80, len(seen))).values.logsumexp(0), 1e-5)


@pytest.mark.parametrize("kind", ["negative", "zero", "mixed"])
@pytest.mark.parametrize("name", ["indexer_topk", "indexer_scores", "dense_indexer_kl"])
def test_the_sign_of_the_head_weights_plays_no_part_in_masking(name, kind, device):
    """sgl-project/sglang#33271: half of the learned weights are negative; a maximum started at 0, or a filler key with
    score 0, wins over every real one."""
    weights = {"negative": -torch.rand(5, 3) - 0.1, "zero": torch.zeros(5, 3), "mixed": torch.randn(5, 3)}[kind]
    field = "index_weights" if name == "dense_indexer_kl" else "weights"
    args = steps.arguments(name, T=5, S=90, Hi=3, K=32, exact=name == "indexer_topk", device=device, **{field: weights})
    steps.check(name, args)


@pytest.mark.parametrize("width", [1, 32, 64, 80, 128])
def test_index_heads_of_every_width(width, device):
    """deepseek-ai/DeepGEMM#433, deepseek-ai/DeepGEMM#434: scores were right for width 128 alone, the only one whose
    pattern in shared memory was the one that the reader assumed."""
    for name in ("indexer_scores", "indexer_topk"):
        args = steps.arguments(name, T=9, S=70, Hi=3, Di=width, K=70, dtype=torch.bfloat16, device=device)
        steps.check(name, args, 1e-5, 3e-2)
        if width == 128:
            continue
        wide = {
            n: torch.nn.functional.pad(x.detach(), (0, 128 - width)) if n in ("q", "k") else x for n, x in args.items()
        }
        got, want = calls.run(name, args), calls.run(name, wide)
        calls.assert_near(got["scores"], want["scores"], 1e-5)


def test_ids_of_an_engine_in_another_precision_are_taken_as_they_are(device):
    """InternLM/xtuner#2076: indexers in fp8 and bfloat16 agree on most ids only, so the engine's ids must be usable."""
    T, S, K = 32, 256, 64
    args = steps.arguments(
        "indexer_topk", **steps.bounds([0] * T, [S] * T, device), T=T, S=S, K=K, Hi=8, Di=32, device=device
    )
    eight = {n: x.detach().to(torch.float8_e4m3fn).float() if n in ("q", "k") else x for n, x in args.items()}
    engine, mine = calls.run("indexer_topk", eight)["indices"], calls.run("indexer_topk", args)["indices"]
    shared = sum(len(set(a) & set(b)) for a, b in zip(engine.tolist(), mine.tolist(), strict=True)) / (T * K)
    assert 0.9 < shared < 1
    replay = steps.arguments(
        "indexer_scores", engine, S=S, Hi=8, Di=32, device=device, **{n: args[n] for n in ("q", "k", "weights")}
    )
    steps.check("indexer_scores", replay)


def test_replayed_ids_that_the_indexer_would_not_choose_keep_their_gradients(device):
    """ISEEKYAN/Megatron-LM#79: scores of replayed ids were gathered from what top-k had left over, zeros elsewhere;
    an id that had drifted out of the selection lost its gradient without a word."""
    T, S, K = 6, 40, 5
    args = steps.arguments("indexer_topk", **steps.bounds([0] * T, [S] * T, device), T=T, S=S, K=K, Hi=4, device=device)
    chosen = calls.run("indexer_topk", args)["indices"].cpu()
    others = [[s for s in range(S) if s not in row][:K] for row in chosen.tolist()]
    replay = steps.arguments(
        "indexer_scores", steps.ids(others), S=S, Hi=4, device=device, **{n: args[n] for n in ("q", "k", "weights")}
    )
    found = steps.check("indexer_scores", replay)
    assert found["scores"].any() and found["grad_q"].any() and found["grad_weights"].any()
