"""The truth: every op in float64, row by row, as the contract words it. Slow on purpose.

Functions take the arguments of the schemas by the same names, in any floating dtype, and return float64 tensors that
are differentiable by plain torch autograd. A row only ever reads its own visible keys or its own valid slots, so what
a key holds that the row may not see cannot matter.

    T query rows, S key rows, H attention heads, D query/key width, Dv value width, Hi/Di index heads and width, K slots
"""

import math

import torch

NEG_INF = -math.inf


def visible(starts, ends, t, S):
    """Ids that row t may see: starts[t] <= id < ends[t], bounds clamped to [0, S]."""
    first, last = (min(max(int(b[t]), 0), S) for b in (starts, ends))
    return list(range(first, last))


def slots(indices, t, S, topk_length=None):
    """(slots, ids) in use in row t: id >= 0 and slot < topk_length[t]. An id >= S there is an IndexError."""
    K = indices.shape[1]
    used = K if topk_length is None else min(max(int(topk_length[t]), 0), K)
    pairs = [(j, int(indices[t, j])) for j in range(used) if int(indices[t, j]) >= 0]
    for _, s in pairs:
        if s >= S:
            raise IndexError(f"id {s} with {S} keys")
    return [j for j, _ in pairs], [s for _, s in pairs]


def in_slots(values, where, K, empty):
    """A row of K slots holding `values` at the slots `where` and `empty` elsewhere."""
    row = torch.full((K,), empty, dtype=torch.float64, device=values.device)
    return row.index_put((torch.tensor(where, dtype=torch.long, device=values.device),), values)


def stacked(rows, shape, like):
    """torch.stack that also works for no rows, still connected to the graph of `like`."""
    return torch.stack(rows) if rows else torch.zeros(shape, dtype=torch.float64, device=like.device) + 0 * like.sum()


def index_score(q, k, weights, t, ids, relu):
    """score[t, s] = sum_h weights[t, h] * act(q[t, h] . k[s]) for s in ids."""
    products = (k[ids].double()[:, None] * q[t].double()).sum(-1)  # [ids, Hi]; no GEMM, so equal keys score equal
    if relu:
        products = products.relu()
    return (products * weights[t].double()).sum(-1)


def order(scores, ids):
    """Positions in `ids` from best to worst: NaN first, then score descending, ties to the lower id; -0.0 == +0.0."""
    values = scores.tolist()
    return sorted(range(len(ids)), key=lambda i: (0, 0.0, ids[i]) if math.isnan(values[i]) else (1, -values[i], ids[i]))


def indexer_topk(q, k, weights, starts, ends, topk, relu=True):
    indices, scores = [], []
    for t in range(q.shape[0]):
        ids = visible(starts, ends, t, k.shape[0])
        score = index_score(q, k, weights, t, ids, relu)
        kept = sorted(order(score.detach(), ids)[:topk])  # positions ascend with ids
        indices.append([ids[i] for i in kept] + [-1] * (topk - len(kept)))
        scores.append(in_slots(score[kept], list(range(len(kept))), topk, NEG_INF))
    indices = torch.tensor(indices, dtype=torch.int32, device=q.device).reshape(q.shape[0], topk)
    return indices, stacked(scores, (0, topk), q)


def indexer_scores(q, k, weights, indices, relu=True):
    T, K = indices.shape
    rows = []
    for t in range(T):
        where, ids = slots(indices, t, k.shape[0])
        rows.append(in_slots(index_score(q, k, weights, t, ids, relu), where, K, NEG_INF))
    return stacked(rows, (0, K), q)


def sparse_mla(q, kv, indices, softmax_scale, d_v, sink=None, topk_length=None):
    T, H, _ = q.shape
    out, lse = [], []
    for t in range(T):
        _, ids = slots(indices, t, kv.shape[0], topk_length)
        if not ids:
            out.append(torch.zeros(H, d_v, dtype=torch.float64, device=q.device))
            lse.append(torch.full((H,), NEG_INF, dtype=torch.float64, device=q.device))
            continue
        rows = kv[ids].double()
        logits = softmax_scale * (q[t].double() @ rows.T)
        lse.append(logits.logsumexp(-1))
        norm = lse[-1] if sink is None else torch.logaddexp(lse[-1], sink.double())
        out.append((logits - norm[:, None]).exp() @ rows[:, :d_v])
    return stacked(out, (0, H, d_v), q), stacked(lse, (0, H), q)


def attention_target(q, kv, lse, indices, softmax_scale, topk_length=None):
    T, K = indices.shape
    rows = []
    for t in range(T):
        where, ids = slots(indices, t, kv.shape[0], topk_length)
        logits = softmax_scale * (q[t].double() @ kv[ids].double().T)
        share = (logits - lse[t].double()[:, None]).exp().sum(0)
        rows.append(in_slots(share, where, K, 0.0))
    return stacked(rows, (0, K), q).detach()


def cross_entropy(target, scores):
    """(-sum_j target log p, sum_j target log target) with p = softmax(scores) and 0 log 0 = 0."""
    log_p = scores.log_softmax(-1)
    some = target > 0
    return -(target * log_p)[some].sum(), (target[some] * target[some].log()).sum()


def indexer_kl(target, scores, indices):
    T, _ = indices.shape
    rows = []
    for t in range(T):
        where = [j for j, s in enumerate(indices[t].tolist()) if s >= 0]
        share, score = target[t].detach().double()[where], scores[t].double()[where]
        if not where or float(share.sum()) < 1e-10:
            rows.append(torch.zeros((), dtype=torch.float64, device=target.device))
            continue
        cross, negative_entropy = cross_entropy(share / share.sum(), score)
        rows.append(cross + negative_entropy)
    return stacked(rows, (0,), scores)


def dense_indexer_kl(
    index_q, index_k, index_weights, q, k, lse, starts, ends, softmax_scale, row_weight, relu=True, total_heads=0
):
    T, H, _ = q.shape
    total = total_heads or H
    rows = []
    for t in range(T):
        ids = visible(starts, ends, t, index_k.shape[0])
        if not ids:
            rows.append(torch.zeros((), dtype=torch.float64, device=q.device))
            continue
        keys = k[ids].detach().double()
        if k.dim() == 2:
            keys = keys[:, None].expand(-1, H, -1)
        logits = softmax_scale * torch.einsum("hd,shd->hs", q[t].detach().double(), keys)
        target = (logits - lse[t].detach().double()[:, None]).exp().sum(0) / total
        cross, negative_entropy = cross_entropy(target, index_score(index_q, index_k, index_weights, t, ids, relu))
        rows.append(cross if total > H else cross + negative_entropy)
    kl = stacked(rows, (0,), index_q)
    return (row_weight.detach().double() * kl).sum(), kl.detach()


def backward(forward, arguments, grads, wanted):
    """Gradients of `forward(**arguments)` for the float64 copies of the arguments named in `wanted`.

    `grads` holds one incoming gradient (or None) per output. An argument that no row reads gets zeros.
    """
    leaves = {n: arguments[n].detach().double().requires_grad_() for n in wanted}
    outputs = forward(**{**arguments, **leaves})
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    pairs = [(o, g.double()) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
    if not pairs or not leaves:
        return {n: torch.zeros_like(x) for n, x in leaves.items()}
    connected, incoming = zip(*pairs, strict=True)
    found = torch.autograd.grad(connected, tuple(leaves.values()), incoming, allow_unused=True)
    return {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), found, strict=True)}
