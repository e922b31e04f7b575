"""Top-k selection: what other implementations got wrong. Ties, special values and odd widths: ops/test_selection.py."""

import pytest
import torch

import calls
import dsa_ops
import oracle
import steps


def assert_contract(indices, scores, starts, ends):
    """Ids inside the row's window, distinct, ascending, as many as there can be; -1 exactly where the score is -inf."""
    indices, scores, K = indices.cpu(), scores.detach().cpu(), indices.shape[1]
    for row, start, end in zip(indices.tolist(), starts.tolist(), ends.tolist(), strict=True):
        found = [s for s in row if s >= 0]
        assert found == sorted(set(found)) and row == found + [-1] * (K - len(found))
        assert len(found) == min(K, max(end - start, 0)) and all(start <= s < end for s in found)
    assert torch.equal(scores == -torch.inf, indices < 0)


@pytest.mark.parametrize("S", [0, 1, 5])
def test_topk_wider_than_the_context(S, device):
    """NVIDIA-NeMo/Automodel#3035, radixark/miles#1122, THUDM/slime#2313: torch.topk raises for k > n."""
    args = steps.arguments("indexer_topk", **steps.causal(S, device), T=S, S=S, K=64, device=device)
    found = steps.check("indexer_topk", args)
    assert found["indices"].shape == (S, 64) and found["indices"].dtype == torch.int32
    assert_contract(found["indices"], found["scores"], args["starts"], args["ends"])


def test_masked_columns_never_come_back_as_ids(device):
    """NVIDIA/Megatron-LM#5049: top-k over a row with fewer visible keys than k returns arbitrary masked columns."""
    args = steps.arguments("indexer_topk", **steps.causal(6, device), T=6, S=6, K=4, device=device)
    found = steps.check("indexer_topk", args)
    assert found["indices"][:3].tolist() == [[0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, -1]]
    chained = calls.op("sparse_mla")(
        torch.randn(6, 2, 8, device=device), torch.randn(6, 8, device=device), found["indices"], 0.3, 8
    )
    assert chained[0].isfinite().all()


@pytest.mark.parametrize("S", [4096, 4097, 8192])
def test_thousands_of_scores_in_one_radix_bin(S, device):
    """sgl-project/sglang#35257, vllm-project/vllm#52149, tile-ai/tilelang#1351: scores that agree in their upper bits
    overran the buffer of candidates: a wrong set, or an illegal access. 60000 keys: ops/test_selection.py."""
    rank = torch.randperm(S)
    k = torch.stack([torch.ones(S), (rank // 256).float(), (rank % 256).float()], 1).to(device)
    q = torch.tensor([[[1.0, 2.0**-15, 2.0**-23]]], device=device)
    indices, _ = calls.op("indexer_topk")(
        q, k, torch.ones(1, 1, device=device), *steps.bounds([0], [S], device).values(), 2048
    )
    assert torch.equal(indices[0].cpu().long(), (rank >= S - 2048).nonzero()[:, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 4096])
def test_a_large_odd_number_of_keys(rows):
    """NVIDIA/cudnn-frontend#311: illegal access at 262209 keys and 4096 rows."""
    S, K = (1 << 18) + 65, 64
    q = torch.randn(rows, 4, 32, device="cuda", dtype=torch.bfloat16)
    k, weights = torch.randn(S, 32, device="cuda", dtype=torch.bfloat16), torch.randn(rows, 4, device="cuda")
    limits = steps.bounds([0] * rows, [S] * rows, "cuda")
    indices, scores = calls.op("indexer_topk")(q, k, weights, *limits.values(), K)
    some = [0, 1, rows // 2, rows - 1]
    assert_contract(indices[some], scores[some], *(b[some].cpu() for b in limits.values()))
    again = calls.op("indexer_scores")(q[some], k, weights[some], indices[some])
    calls.assert_near(again, scores[some])
    want = torch.einsum("th,ths->ts", weights[some], (q[some].float() @ k.float().t()).relu()).topk(K).values
    calls.assert_near(scores[some].sort(descending=True).values, want, 1e-4)


@pytest.mark.parametrize("heads", [1, 4])
def test_ties_are_settled_alike_on_every_rank(heads, device):
    """ROCm/aiter#4376, ROCm/aiter#4415, vllm-project/vllm#54394, flashinfer-ai/flashinfer#2584: hundreds of equal
    scores at the edge, slots claimed by whichever thread came first: every tensor-parallel rank had keys of its own.
    Here ranks differ in how they cut and order the rows."""
    T, S, K = 48, 300, 70
    args = steps.arguments("indexer_topk", T=T, S=S, K=K, Hi=heads, Di=2, exact=True, device=device)
    indices, scores = calls.run("indexer_topk", args).values()
    want = calls.reference("indexer_topk", args)["indices"]
    assert torch.equal(indices.cpu(), want)
    order = torch.randperm(T, device=device)
    for rows in (slice(0, 1), slice(7, None), order):
        part = {n: x[rows] if n in calls.ROWS - {"k"} and isinstance(x, torch.Tensor) else x for n, x in args.items()}
        got = calls.run("indexer_topk", part)
        calls.assert_all_equal(got, {"indices": indices[rows], "scores": scores[rows]})


@pytest.mark.parametrize("tail", [float("nan"), float("inf"), 1e30])
def test_the_stale_tail_of_an_overallocated_key_cache(tail, device):
    """tenstorrent/tt-metal#49359, vllm-project/vllm#33568: keys are written up to a point; what lies behind is scored
    and must not be ranked, nor reach a gradient."""
    written, T = 9, 5
    args = steps.arguments("indexer_topk", **steps.bounds([0] * T, [written] * T), T=T, S=64, K=12, device=device)
    with torch.no_grad():
        args["k"][written:] = tail
    found = steps.check("indexer_topk", args)
    assert_contract(found["indices"], found["scores"], args["starts"], args["ends"])
    assert not found["grad_k"][written:].any()


@pytest.mark.parametrize("name", ["k", "q", "weights"])
def test_a_nan_gives_ids_that_can_be_used(name, device):
    """vllm-project/vllm#49896, sgl-project/sglang#31115: slots that no score won kept garbage, and the next kernel
    read it."""
    args = steps.arguments("indexer_topk", **steps.causal(12, device), T=12, S=12, K=5, device=device)
    with torch.no_grad():
        args[name][4] = float("nan")
    indices, scores = calls.run("indexer_topk", args).values()
    limits = args["starts"], args["ends"]
    assert_contract(indices, scores.nan_to_num(0, float("inf"), float("-inf")), *limits)
    nan = calls.reference("indexer_topk", args)
    assert torch.equal(indices.cpu(), nan["indices"]) and torch.equal(scores.cpu().isnan(), nan["scores"].isnan())


def test_the_same_selection_for_every_order_of_batch_and_pack(device):
    """sgl-project/sglang#12457: the bounds of the second request were counted in its own keys, the scores in the
    pack's; it ranked the scores of the first."""
    B, L, M, K = 3, 7, 9, 4
    q, k, weights = torch.randn(B, L, 2, 4), torch.randn(B, M, 4), torch.randn(B, L, 2)
    k[0] += 100 * q[1, 0, 0]  # the keys of sequence 0 would win every row of sequence 1
    starts, ends = torch.zeros(B, L, dtype=torch.int32), torch.arange(3, 3 + L, dtype=torch.int32).expand(B, L)
    moved = [x.to(device) for x in (q, k, weights)]
    batched = dsa_ops.indexer_topk(*moved, starts=starts.to(device), ends=ends.to(device), topk=K)
    offset = torch.arange(B, dtype=torch.int32)[:, None] * M
    packed = dsa_ops.indexer_topk(
        *(x.flatten(0, 1) for x in moved),
        starts=(starts + offset).flatten().to(device),
        ends=(ends + offset).flatten().to(device),
        topk=K,
    )
    local = torch.where(packed.indices < 0, -1, packed.indices - offset.expand(B, L).reshape(-1, 1).to(device))
    assert torch.equal(batched.indices.flatten(0, 1), local) and torch.equal(
        batched.scores.flatten(0, 1), packed.scores
    )
    for b in range(B):
        want = oracle.indexer_topk(q[b], k[b], weights[b], starts[b], ends[b], K)[0]
        assert torch.equal(batched.indices[b].cpu(), want)
