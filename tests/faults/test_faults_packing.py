"""Packed sequences, empty ones, context-parallel rows: what other implementations got wrong."""

import pytest
import torch

import calls
import dsa_ops
import inputs
import steps
from dsa_ops import layouts


class Pack:
    """One layer's inputs in float64 for T rows and as many keys; `step` runs all of it for some rows."""

    NAMES = ("index_q", "weights", "q")
    KEYS = ("index_k", "kv")

    def __init__(self, T, device="cpu", K=4):
        def leaf(*shape):
            return torch.randn(*shape, dtype=torch.float64, device=device).requires_grad_()

        self.device, self.K = device, K
        self.x = {"index_q": leaf(T, 2, 4), "weights": leaf(T, 2), "q": leaf(T, 3, 6)}
        self.x |= {"index_k": leaf(T, 4), "kv": leaf(T, 6)}

    def step(self, starts, ends, rows=slice(None), changed=None):
        """Per-row results of every op for rows with these bounds, and the gradients of all leaves."""
        x = {n: leaf.detach().clone().requires_grad_() for n, leaf in {**self.x, **(changed or {})}.items()}
        index_q, weights, q = (x[n][rows] for n in self.NAMES)
        limits = {"starts": starts.to(self.device), "ends": ends.to(self.device)}
        indices, scores = dsa_ops.indexer_topk(index_q, x["index_k"], weights, **limits, topk=self.K)
        out, lse = dsa_ops.sparse_mla(q, x["kv"], indices, 0.3, 5)
        target = dsa_ops.attention_target(q.detach(), x["kv"].detach(), lse.detach(), indices, 0.3)
        kl = dsa_ops.indexer_kl(target, scores, indices)
        dense_lse = torch.einsum("thd,sd->ths", q.detach(), x["kv"].detach()).mul(0.3)
        s = torch.arange(x["kv"].shape[0], device=self.device)
        seen = (s >= limits["starts"][:, None]) & (s < limits["ends"][:, None])
        dense_lse = dense_lse.masked_fill(~seen[:, None], -torch.inf).logsumexp(-1)
        one = torch.ones(q.shape[0], dtype=torch.float64, device=self.device)
        dense = dsa_ops.dense_indexer_kl(
            index_q,
            x["index_k"],
            weights,
            q.detach(),
            x["kv"].detach(),
            dense_lse,
            **limits,
            softmax_scale=0.3,
            row_weight=one,
        )
        weight = 1 + torch.arange(5, dtype=torch.float64, device=self.device)
        ((out * weight).sum() + kl.sum() + dense.loss).backward()
        results = {
            "indices": indices,
            "scores": scores,
            "out": out,
            "lse": lse,
            "target": target,
            "kl": kl,
            "dense": dense.kl,
        }
        return {n: r.detach() for n, r in results.items()}, {n: leaf.grad for n, leaf in x.items()}


def cu(*values):
    return torch.tensor(values, dtype=torch.int32)


def assert_same(got, want, what):
    """Bit for bit; what hangs on `step`'s own lse, a product of PyTorch's, nearly."""
    if what == "dense":
        calls.assert_near(got, want)
    else:
        assert torch.equal(calls.bits(got), calls.bits(want)), what


@pytest.mark.parametrize("cu_seqlens", [(0, 0, 3, 7), (0, 3, 3, 7), (0, 3, 7, 7), (0, 0, 0, 3, 3, 7, 7, 7)])
def test_sequences_without_rows_change_nothing(cu_seqlens, device):
    """Dao-AILab/flash-attention#2562, Dao-AILab/flash-attention#2421, Dao-AILab/flash-attention#1254: a value that
    cu_seqlens repeats gave error 700, NaN gradients, or a backward that never ended."""
    pack = Pack(7, device)
    want = pack.step(*layouts.packed_bounds(cu(0, 3, 7)))
    got = pack.step(*layouts.packed_bounds(cu(*cu_seqlens)))
    for a, b in zip(got, want, strict=True):
        calls.assert_all_equal(a, b) if a is got[0] or device == "cpu" else calls.assert_all_near(a, b)


@pytest.mark.parametrize("lengths", [((0, 2, 2, 5), (0, 3, 4, 4)), ((0, 0, 5), (0, 4, 4)), ((0, 5), (0, 0))])
def test_sequences_with_rows_and_no_keys_or_keys_and_no_rows(lengths, device):
    """Dao-AILab/flash-attention#2568, Dao-AILab/flash-attention#1713: one side of a sequence is empty."""
    q, k = lengths
    starts, ends = layouts.packed_bounds(cu(*q), cu(*k), num_rows=5)
    args = steps.arguments("indexer_topk", T=5, S=max(k), K=3, starts=starts, ends=ends, device=device)
    found = steps.check("indexer_topk", args)
    mla = steps.arguments("sparse_mla", found["indices"].cpu(), S=max(k), device=device)
    steps.check("sparse_mla", mla)
    blind = (ends <= starts).to(device)
    assert blind.any() and (found["indices"][blind] == -1).all()


@pytest.mark.parametrize("name", inputs.OPS)
def test_no_rows_at_all(name, device):
    """Dao-AILab/flash-attention#2562: zero rows in, zero rows out, and a gradient of zeros for the keys."""
    args = steps.arguments(name, T=0, device=device)
    found = steps.check(name, args)
    for n, x in found.items():
        assert not x.is_floating_point() or not x.any(), n


@pytest.mark.parametrize("cu_seqlens", [(0, 1), (0, 0, 1, 1, 2), (0, 0, 0, 0, 1), (0, 1, 2, 3)])
def test_sequences_of_one_token(cu_seqlens, device):
    """Dao-AILab/flash-attention#1537, Dao-AILab/flash-attention#1619: a shortcut for a longest length of 1 took every
    sequence for one row; there may be fewer rows than sequences."""
    T = cu_seqlens[-1]
    pack = Pack(T, device)
    results, grads = pack.step(*layouts.packed_bounds(cu(*cu_seqlens)))
    own = torch.arange(T, device=device)
    assert torch.equal(results["indices"][:, 0].long(), own) and (results["indices"][:, 1:] == -1).all()
    calls.assert_near(results["out"], pack.x["kv"][:, None, :5].expand(T, 3, 5))
    assert not results["kl"].abs().gt(1e-12).any() and not results["dense"].abs().gt(1e-12).any()
    weight = 1 + torch.arange(5, dtype=torch.float64)
    calls.assert_near(grads["kv"][:, :5], 3 * weight.expand(T, 5))
    assert grads["index_q"].abs().max() < 1e-12


@pytest.mark.parametrize("split", ["zigzag", "shuffled", "empty rank"])
def test_rows_of_a_pack_may_be_spread_over_ranks_in_any_order(split, device):
    """NVIDIA/TransformerEngine#3331, NVIDIA/TransformerEngine#1930, mindspore-ai/hyper-parallel#55,
    sgl-project/sglang#33197, NVIDIA/TransformerEngine#2186: lengths divided by the number of ranks lost the last
    tokens, bounds stayed behind when rows were reordered, a rank with padding alone got exploding gradients. Rows
    carry their global bounds; all ranks together are one."""
    pack = Pack(16, device, K=8)
    starts, ends = layouts.packed_bounds(cu(0, 5, 12), num_rows=16)  # 4 rows of padding at the end
    whole, whole_grads = pack.step(starts, ends)
    order = {
        "zigzag": [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11],
        "shuffled": torch.randperm(16).tolist(),
        "empty rank": [*range(8), 8, 9, 10, 11, 12, 13, 14, 15],
    }[split]
    parts = (order[:12], order[12:]) if split == "empty rank" else (order[:8], order[8:])
    summed = {n: torch.zeros_like(g) for n, g in whole_grads.items()}
    for rows in map(torch.tensor, parts):
        part, grads = pack.step(starts[rows], ends[rows], rows.to(device))
        for n, x in part.items():
            assert_same(x, whole[n][rows.to(device)], n)
        for n, g in grads.items():
            summed[n] += g
    calls.assert_all_near(summed, whole_grads)
    assert not whole["out"][12:].any() and whole["indices"][11, 0] >= 5 and (whole["indices"][11] == 11).any()


def test_other_documents_change_nothing(device):
    """PaddlePaddle/PaddleFleet#1052: a fused path took a mask and did not use it. Everything of the second document is
    the same bit for bit, its gradients too."""
    pack = Pack(14, device)
    limits = layouts.packed_bounds(cu(0, 6, 14))
    changed = {n: x.detach().clone() for n, x in pack.x.items()}
    for n, x in changed.items():
        x[:6] = x[:6] * -50 + (1e4 if n in Pack.KEYS else 0)
    before, before_grads = pack.step(*limits)
    after, after_grads = pack.step(*limits, changed=changed)
    for n, x in before.items():
        assert_same(x[6:], after[n][6:], n)
    for n, g in before_grads.items():
        if device == "cpu":
            assert torch.equal(calls.bits(g[6:]), calls.bits(after_grads[n][6:])), n
        else:
            calls.assert_near(g[6:], after_grads[n][6:])


def test_bounds_that_are_part_of_a_larger_buffer():
    """Dao-AILab/flash-attention#2333: reading one past either end of the bounds. Here they are the first and the last
    elements of larger buffers that hold the wrong rows."""
    pack = Pack(7)
    starts, ends = layouts.packed_bounds(cu(0, 3, 7))
    want, _ = pack.step(starts, ends)
    around = [
        torch.cat([torch.full((3,), v, dtype=torch.int32), b, torch.full((3,), v, dtype=torch.int32)])
        for v, b in ((-9, starts), (10**9, ends))
    ]
    got, _ = pack.step(*(b[3:-3] for b in around))
    calls.assert_all_equal(got, want)


@pytest.mark.parametrize("name", steps.ID_OPS)
def test_ids_and_keys_with_a_dimension_for_key_heads_are_refused(name):
    """vllm-project/vllm#57388: of two callers one passed [rows, topk] and the other [rows, 1, topk]; strides were
    misread, and long inputs crashed."""
    args = steps.arguments(name, steps.ids([[0, 1, -1, 2, 3, 4]], 5), S=9)
    key = steps.KEYS[name]
    for changes in ({"indices": args["indices"][:, None]}, {key: args[key][:, None]}):
        bad = {**args, **changes}
        wrong = next(iter(changes))
        with pytest.raises(ValueError, match=rf"{name}: {wrong} must have shape"):
            calls.op(name)(*bad.values())
    positional = [
        x for n, x in {**args, "indices": args["indices"][:, None]}.items() if n not in ("sink", "relu", "topk_length")
    ]
    with pytest.raises(ValueError, match=rf"{name}: indices must have shape"):
        getattr(dsa_ops, name)(*positional)


@pytest.mark.parametrize("reentrant", [False, True])
def test_two_recomputed_micro_batches_at_once_keep_their_own_ids(reentrant, device):
    """NVIDIA/Megatron-LM#6793, NVIDIA/Megatron-LM#7010, NovaSky-AI/SkyRL#2134: forward 1, forward 2, backward 1,
    backward 2; ids that were kept on an object shared by both were those of the second."""
    from torch.utils.checkpoint import checkpoint

    def block(q, kv, index_q, index_k, weights):
        indices, scores = dsa_ops.indexer_topk(index_q, index_k, weights, topk=3)
        out, lse = dsa_ops.sparse_mla(q, kv, indices, 0.3, 5)
        loss = dsa_ops.indexer_loss(q, kv, lse, indices, scores, 0.3)
        return dsa_ops.attach_loss(out, loss)

    packs = [Pack(6, device), Pack(6, device)]
    order = ("q", "kv", "index_q", "index_k", "weights")

    def gradients(run):
        batches = [[p.x[n].detach().clone().requires_grad_() for n in order] for p in packs]
        outputs = [run(*b) for b in batches]
        for out in outputs:
            out.square().sum().backward()
        return [x.grad for b in batches for x in b]

    want = gradients(block)
    got = gradients(lambda *x: checkpoint(block, *x, use_reentrant=reentrant))
    for a, b in zip(got, want, strict=True):
        calls.assert_near(a, b)
