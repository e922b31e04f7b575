"""Every op shard by shard in one process, queries local and keys gathered, against the same op on the whole pack."""

import pytest
import torch

import dsa_ops
from dsa_ops.layouts import contiguous_cp, packed_bounds, zigzag_cp

PACKS = {  # cu_seqlens, cu_seqlens_padded, total
    "one": ([0, 48], None, 48),
    "packed": ([0, 16, 16, 48], None, 48),
    "padded": ([0, 11, 11, 40], [0, 16, 16, 48], 56),
}
H, D, Dv, Hi, Di, K = 3, 7, 5, 2, 6, 9
SCALE = 0.5


class Sharded:
    """The whole pack's tensors and bounds, and the ranks' layouts."""

    def __init__(self, pack, function, cp_size):
        real, padded, self.rows = PACKS[pack]
        real, padded = torch.tensor(real), None if padded is None else torch.tensor(padded)
        self.starts, self.ends = packed_bounds(real, num_rows=self.rows, cu_seqlens_q_padded=padded)
        self.layouts = [
            function(real, cp_size, rank, total=self.rows, cu_seqlens_padded=padded) for rank in range(cp_size)
        ]

    def leaf(self, *shape):
        return torch.randn(self.rows, *shape, dtype=torch.float64, requires_grad=True)

    def gathered(self, x):
        """Keys as an all-gather and `gather_order` bring them to every rank; differentiable."""
        return torch.cat([x[layout.rows] for layout in self.layouts])[self.layouts[0].gather_order]

    def both(self, run, queries, keys, others=()):
        """`run(starts, ends, queries, keys, others)` gives outputs by name, row vectors or sums: on the whole pack, and
        on the shards with rows put back in their places and sums added up. Returns two pairs (outputs, gradients).

        Gradients are those of the same random combination of everything differentiable.
        """
        leaves = [*queries, *keys, *others]
        whole = run(self.starts, self.ends, queries, keys, others)
        sharded = {name: torch.zeros_like(x) for name, x in whole.items()}
        for layout in self.layouts:
            local = run(
                layout.starts,
                layout.ends,
                [x[layout.rows] for x in queries],
                [self.gathered(x) for x in keys],
                others,
            )
            for name, x in local.items():
                if x.dim():
                    sharded[name] = sharded[name].index_copy(0, layout.rows, x)
                else:
                    sharded[name] = sharded[name] + x
        factors = {name: torch.randn_like(x) for name, x in whole.items() if x.requires_grad}
        results = []
        for outputs in (whole, sharded):
            # -inf and its gradient 0 stay out
            total = sum((factors[name] * outputs[name].masked_fill(outputs[name].isinf(), 0)).sum() for name in factors)
            grads = torch.autograd.grad(total, leaves, allow_unused=True) if factors else [None] * len(leaves)
            results.append((outputs, grads))
        return results


def check(results, exact=()):
    (whole, whole_grads), (sharded, sharded_grads) = results
    assert whole.keys() == sharded.keys()
    for name, want in whole.items():
        if name in exact:
            assert torch.equal(sharded[name], want), name
        else:
            torch.testing.assert_close(sharded[name], want, atol=1e-13, rtol=1e-12, msg=name)
    assert [grad is None for grad in sharded_grads] == [grad is None for grad in whole_grads]
    for number, (got, want) in enumerate(zip(sharded_grads, whole_grads, strict=True)):
        if want is not None:
            assert want.abs().max() > 1e-3
            torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10, msg=f"gradient {number}")


@pytest.fixture(params=PACKS)
def pack(request):
    return request.param


@pytest.fixture(params=[zigzag_cp, contiguous_cp], ids=["zigzag", "contiguous"])
def function(request):
    return request.param


@pytest.fixture(params=[1, 2, 4, 8])
def sharded(request, pack, function):
    return Sharded(pack, function, request.param)


def test_selection_and_scores(sharded):
    def run(starts, ends, queries, keys, others):
        (q, weights), (k,) = queries, keys
        selected = dsa_ops.indexer_topk(q, k, weights, starts=starts, ends=ends, topk=K)
        again = dsa_ops.indexer_scores(q, k, weights, selected.indices)
        return {"indices": selected.indices, "scores": selected.scores, "again": again}

    queries = [sharded.leaf(Hi, Di), sharded.leaf(Hi)]
    check(sharded.both(run, queries, [sharded.leaf(Di)]), exact=("indices",))


def test_sparse_attention(sharded):
    index_q, index_weights, index_k = sharded.leaf(Hi, Di), sharded.leaf(Hi), sharded.leaf(Di)

    def run(starts, ends, queries, keys, others):
        (q, iq, iw), (kv, ik), (sink,) = queries, keys, others
        indices = dsa_ops.indexer_topk(iq.detach(), ik.detach(), iw.detach(), starts=starts, ends=ends, topk=K).indices
        out, lse = dsa_ops.sparse_mla(q, kv, indices, SCALE, Dv, sink=sink)
        target = dsa_ops.attention_target(q, kv, lse, indices, SCALE)
        return {"indices": indices, "out": out, "lse": lse, "target": target}

    sink = torch.randn(H, dtype=torch.float64, requires_grad=True)
    queries = [sharded.leaf(H, D), index_q, index_weights]
    check(sharded.both(run, queries, [sharded.leaf(D), index_k], [sink]), exact=("indices",))


def test_loss_of_the_selection(sharded):
    """Sums add up; so does what each row brings."""
    q, kv = sharded.leaf(H, D).detach(), sharded.leaf(D).detach()
    mask = torch.rand(sharded.rows) < 0.7

    def run(starts, ends, queries, keys, others):
        (iq, iw, q, mask), (ik, kv) = queries, keys
        indices, scores = dsa_ops.indexer_topk(iq, ik, iw, starts=starts, ends=ends, topk=K)
        lse = dsa_ops.sparse_mla(q, kv, indices, SCALE, Dv).lse
        target = dsa_ops.attention_target(q, kv, lse, indices, SCALE)
        kl = dsa_ops.indexer_kl(target, scores, indices)
        loss = dsa_ops.indexer_loss(
            q, kv, lse, indices, scores, SCALE, row_mask=mask.bool(), reduction="sum", coeff=0.3
        )
        return {"kl": kl, "loss": loss}

    queries = [sharded.leaf(Hi, Di), sharded.leaf(Hi), q, mask.double()]
    for x in queries[2:]:
        x.requires_grad_()
    results = sharded.both(run, queries, [sharded.leaf(Di), kv.requires_grad_()])
    (whole, grads), _ = results
    assert grads[2] is None or not grads[2].any()
    check([(outputs, [grads[0], grads[1], grads[4]]) for outputs, grads in results])
    assert whole["loss"] > 0


@pytest.mark.parametrize("expanded", [False, True], ids=["latent", "expanded"])
def test_dense_loss(sharded, expanded):
    weight = torch.rand(sharded.rows, dtype=torch.float64)
    attention = sharded.leaf(H, D).detach(), sharded.leaf(*([H, D] if expanded else [D])).detach()

    def run(starts, ends, queries, keys, others):
        (iq, iw, q, weight), (ik, k) = queries, keys
        logits = SCALE * torch.einsum("thd,shd->ths" if expanded else "thd,sd->ths", q, k)
        ids = torch.arange(k.shape[0])
        visible = (ids >= starts[:, None]) & (ids < ends[:, None])
        lse = logits.masked_fill(~visible[:, None], -torch.inf).logsumexp(-1).detach()
        loss, kl = dsa_ops.dense_indexer_kl(
            iq, ik, iw, q, k, lse, starts=starts, ends=ends, softmax_scale=SCALE, row_weight=weight
        )
        return {"loss": loss, "kl": kl.detach()}

    queries = [sharded.leaf(Hi, Di), sharded.leaf(Hi), attention[0].requires_grad_(), weight.requires_grad_()]
    results = sharded.both(run, queries, [sharded.leaf(Di), attention[1].requires_grad_()])
    check([(outputs, [grads[0], grads[1], grads[4]]) for outputs, grads in results])
