"""Empty slots, ids of both sentinel styles, rows without keys: what other implementations got wrong."""

import pytest
import torch

import calls
import dsa_ops
import steps
from steps import ID_OPS, KEYS, ids


@pytest.mark.parametrize("poison", [float("inf"), float("nan"), 3e38])
@pytest.mark.parametrize("name", ID_OPS)
def test_the_row_before_the_keys_does_not_leak_through_minus_one(name, poison, device):
    """radixark/miles#2079: -1 read the element before the keys; an inf there times weight 0 gave NaN gradients."""
    key = KEYS[name]
    args = steps.arguments(name, ids([[0, 1, -1, -1], [-1, 2, -1, 3]], 3), device=device, dtype=torch.float64)
    buffer = torch.cat([torch.full_like(args[key][:1], poison), args[key]]).detach()
    args[key] = buffer[1:].requires_grad_(args[key].requires_grad)
    assert args[key].storage_offset() > 0
    steps.check(name, args)


@pytest.mark.parametrize("name", ["indexer_scores", "sparse_mla"])
def test_keys_without_an_id_get_a_gradient_of_exactly_zero(name, device):
    """Dao-AILab/flash-attention#2755: the backward added to address -1, in front of the buffer or in another batch."""
    found = steps.check(name, steps.arguments(name, ids([[3, -1, -1, -1]], 5), device=device, S=7))
    grad = found[f"grad_{KEYS[name]}"]
    assert not grad[[0, 1, 2, 4, 5, 6]].any() and grad[3].any()


def test_minus_one_in_a_batch_does_not_reach_the_sequence_before(device):
    """Dao-AILab/flash-attention#2755: batch row 1 wrote to the last key of batch row 0."""
    q, kv = torch.randn(2, 5, 3, 8, device=device), torch.randn(2, 7, 8, device=device)
    kv[0, -1] = float("nan")  # no id names it
    indices = ids([[3, -1, 0, -1]], 5).to(device).expand(2, 5, 4)
    kv.requires_grad_()
    out, lse = dsa_ops.sparse_mla(q, kv, indices)
    (out.sum() + lse.sum()).backward()
    assert out.isfinite().all() and not kv.grad[:, [1, 2, 4, 5, 6]].any() and kv.grad[:, [0, 3]].isfinite().all()


@pytest.mark.parametrize("empty", [16, 64, 96, 128])
@pytest.mark.parametrize("name", [*ID_OPS, "indexer_kl"])
def test_a_leading_block_of_empty_slots_changes_nothing(name, empty, device):
    """vllm-project/vllm#48364, vllm-project/vllm#48366, AMD-AGI/Primus-Turbo#417: NaN where the first tile of ids is
    all -1, since the running maximum is still -inf."""
    valid, pad = torch.arange(32, dtype=torch.int32).repeat(3, 1), torch.full((3, empty), -1, dtype=torch.int32)
    first = steps.arguments(name, torch.cat([pad, valid], 1), device=device, S=40, dtype=torch.float64)
    last = {**first, "indices": torch.cat([valid, pad], 1).to(device)}
    for n in {"scores", "target"} & first.keys():
        last[n] = first[n].detach().roll(-empty, 1).requires_grad_(first[n].requires_grad)
    found = [calls.run(name, args) for args in (first, last)]
    back = {n: x.roll(empty, 1) if n in ("scores", "target") else x for n, x in found[1].items()}
    calls.assert_all_near(found[0], back, 1e-12)
    steps.check(name, first)


PAST = [8, 9, 2147480000, 2**31 - 1]


@pytest.mark.parametrize("name", ID_OPS)
def test_ids_of_both_sentinel_styles(name, device):
    """NVIDIA/cudnn-frontend#676, NVIDIA/cudnn-frontend#877, deepseek-ai/FlashMLA#109: a kernel that knows -1 alone
    reads out of bounds for "any number >= the number of keys"; id * stride wraps in 32 bits."""
    kept = ids([[0, 5, -1, 3, -(2**31), -2]], 2)
    args = steps.arguments(name, kept, device=device, S=8)
    want = steps.check(name, args)
    for past in PAST:
        bad = {**args, "indices": torch.where(kept == -1, past, kept).to(device)}
        if torch.device(device).type == "cpu":
            with pytest.raises(IndexError, match=f"{name}: indices must be below S = 8.*got {past}"):
                calls.run(name, bad)
        else:
            got = calls.run(name, bad)
            calls.assert_all_near(got, {n: want[n] for n in got})


@pytest.mark.parametrize("name", ["indexer_topk", *ID_OPS, "dense_indexer_kl"])
def test_more_keys_than_ids_can_name(name):
    """NVIDIA/cudnn-frontend#676: ids are int32, so 2**31 keys are refused; here all of them are one row of memory."""
    args = steps.arguments(name, optional=False)
    keys = {n: args[n].detach()[:1].expand(2**31, *args[n].shape[1:]) for n in ("k", "kv", "index_k") if n in args}
    wrong = "index_k" if name == "dense_indexer_kl" else KEYS[name]
    for device in ("cpu", "meta"):
        bad = {**args, **keys}
        bad = {n: x.to(device) if isinstance(x, torch.Tensor) and n not in keys else x for n, x in bad.items()}
        bad |= {n: x[:1].to(device).expand(x.shape) for n, x in keys.items()}
        with pytest.raises(ValueError, match=rf"{name}: {wrong} must have fewer than 2\*\*31 rows"):
            calls.op(name)(*bad.values())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["indexer_scores", "sparse_mla"])
def test_gradients_with_ids_of_both_sentinel_styles_on_cuda(name):
    """NVIDIA/cudnn-frontend#676: the backward fed the score of an invalid id into exp, and inf * dP is NaN."""
    kept = ids([[0, 5, -1, 3, -1, -1], [-1, -1, -1, -1, -1, -1]], 2)
    args = steps.arguments(name, kept, device="cuda", S=8, dtype=torch.float64)
    incoming = calls.incoming(name, calls.run(name, args))
    want = steps.run(name, args, incoming)
    for past in PAST:
        got = steps.run(name, {**args, "indices": torch.where(kept == -1, past, kept).cuda()}, incoming)
        calls.assert_all_near(got, want, 1e-12)


@pytest.mark.parametrize("name", ID_OPS)
def test_valid_ids_in_columns_past_the_number_of_keys(name, device):
    """NVIDIA/cudnn-frontend#298: a bound compared the column of the slot with the number of keys; part of dKV was 0."""
    wide = torch.full((4, 256), -1, dtype=torch.int32)
    wide[:, -3:] = torch.tensor([1, 4, 7], dtype=torch.int32)
    found = steps.check(name, steps.arguments(name, wide, device=device, S=8))
    if name != "attention_target":
        assert (found[f"grad_{KEYS[name]}"][[1, 4, 7]] != 0).any(-1).all()


@pytest.mark.parametrize("name", ["sparse_mla", "attention_target"])
def test_stale_ids_past_the_length_of_a_row_do_not_count_for_any_number_of_rows(name, device):
    """flashinfer-ai/flashinfer#5095: above 64 rows another kernel ran, which did not bound the slots of a row."""
    T, S, K = 257, 40, 16
    fresh = torch.randint(0, S, (T, K), dtype=torch.int32)
    length = torch.randint(0, K + 1, (T,), dtype=torch.int32)
    clean = torch.where(torch.arange(K) < length[:, None], fresh, -1)
    args = steps.arguments(name, clean, device=device, S=S)
    stale = {**args, "indices": fresh.to(device), "topk_length": length.to(device)}
    want = calls.run(name, args)
    for rows in (1, 63, 64, 65, 129, 257):
        part = {n: x[:rows] if n in calls.ROWS and isinstance(x, torch.Tensor) else x for n, x in stale.items()}
        got = calls.run(name, part)
        calls.assert_all_equal(got, {n: x[:rows] for n, x in want.items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_rows_through_a_whole_step(dtype, device):
    """NVIDIA-NeMo/Automodel#2633, NVIDIA/apex#1390: softmax over a row that is masked everywhere is NaN, or the mean
    of all keys."""
    T, K = 8, 4
    step = steps.arguments("indexer_topk", T=T, S=T, K=K, device=device, dtype=dtype)
    mla = steps.arguments("sparse_mla", ids([[-1] * K], T), S=T, device=device, dtype=dtype, sink=None)
    limits = steps.bounds([0] * T, [1, 2, 3, 0, 0, 6, 0, 0], device)
    padding = [3, 4, 6, 7]
    leaves = {"index_q": step["q"], "index_k": step["k"], "weights": step["weights"], "q": mla["q"], "kv": mla["kv"]}
    with torch.no_grad():
        for n in ("index_q", "weights", "q"):
            leaves[n][padding] = float("nan")  # a padding row may hold anything
    indices, scores = dsa_ops.indexer_topk(*list(leaves.values())[:3], **limits, topk=K)
    out, lse = dsa_ops.sparse_mla(leaves["q"], leaves["kv"], indices, d_v=5)
    loss = dsa_ops.indexer_loss(leaves["q"], leaves["kv"], lse, indices, scores, None)
    (out.float().square().sum() + loss).backward()
    assert not out[padding].any() and (lse[padding] == -torch.inf).all() and loss.isfinite()
    for n, x in leaves.items():
        assert x.grad.isfinite().all() and x.grad.any(), n
        if x.shape[0] == T and n in ("index_q", "weights", "q"):
            assert not x.grad[padding].any(), n


def test_rows_whose_replayed_ids_are_all_invalid_do_not_poison_the_others(device):
    """radixark/miles#1253: all index scores of such a row were -inf, the softmax NaN, and 0 * NaN reached the rest."""
    args = steps.arguments("indexer_scores", ids([[0, 2, 5], [-1, -1, -1], [4, -1, 1]], 2), device=device)
    scores = calls.run("indexer_scores", args)["scores"]
    target = torch.rand_like(scores) * (args["indices"] >= 0)
    kl = calls.op("indexer_kl")(target, scores, args["indices"])
    kl.sum().backward()
    assert kl.isfinite().all() and not kl[[1, 4]].any()
    for n in ("q", "k", "weights"):
        assert args[n].grad.isfinite().all() and args[n].grad.any(), n
    assert not args["q"].grad[[1, 4]].any() and not args["weights"].grad[[1, 4]].any()
