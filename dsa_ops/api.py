"""The public functions: defaults, int64 ids, batched tensors and named results around torch.ops.dsa.*.

Packed tensors ("THD") are the ops' own layout: T query rows, S key rows. Batched tensors [B, L, ...] for queries and
[B, M, ...] for keys mean B independent sequences, with ids and bounds local to their own sequence; results come back as
[B, L, ...]. Whether a call is batched is told by the rank of the first argument.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsa_ops import checks, dispatch
from dsa_ops import ops as _ops  # noqa: F401  (registers torch.ops.dsa.*)
from dsa_ops.checks import MAX_ROWS, validates
from dsa_ops.ops._register import autocast_arguments
from dsa_ops.results import DenseIndexerKLOutput, IndexerTopkOutput, SparseMLAOutput

_INT32_MAX = MAX_ROWS - 1  # no key has this id: the op refuses it on CPU and takes it for an empty slot on CUDA

_indexer_topk = torch.ops.dsa.indexer_topk.default
_indexer_scores = torch.ops.dsa.indexer_scores.default
_sparse_mla = torch.ops.dsa.sparse_mla.default
_attention_target = torch.ops.dsa.attention_target.default
_indexer_kl = torch.ops.dsa.indexer_kl.default
_dense_indexer_kl = torch.ops.dsa.dense_indexer_kl.default


class _Batch(NamedTuple):
    """Sizes of a batched call: B sequences of L query rows and M keys."""

    op: str
    size: int
    rows: int
    keys: int

    def pack(self, name: str, x: Tensor, per_key: bool = False) -> Tensor:
        """[B, L, ...] (or [B, M, ...]) -> [B * L, ...]."""
        length, label = (self.keys, "M") if per_key else (self.rows, "L")
        if x.dim() < 2 or x.shape[0] != self.size or x.shape[1] != length:
            raise ValueError(
                f"{self.op}: {name} must start with [B, {label}] = [{self.size}, {length}] in a batched call, "
                f"got {x.dtype} {[*x.shape]}"
            )
        return x.flatten(0, 1)

    def unpack(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.size, self.rows))

    def first_keys(self, device: torch.device) -> Tensor:
        """[B, 1]: where each sequence's keys begin in the pack."""
        return (torch.arange(self.size, device=device, dtype=torch.int32) * self.keys).unsqueeze(1)

    def pack_bound(self, name: str, bound: Tensor) -> Tensor:
        bound = _int32(self.op, name, bound)
        self.pack(name, bound)
        return (bound.clamp(0, self.keys) + self.first_keys(bound.device)).flatten()

    def pack_ids(self, ids: Tensor) -> Tensor:
        """Local ids -> rows of the pack; an id at or past M stays out of range instead of meeting the next sequence."""
        self.pack("indices", ids)
        if ids.dim() != 3:
            raise ValueError(f"{self.op}: indices must have shape [B, L, K], got {ids.dtype} {[*ids.shape]}")
        packed = torch.where(ids < self.keys, ids + self.first_keys(ids.device).unsqueeze(-1), _INT32_MAX)
        return torch.where(ids < 0, -1, packed).flatten(0, 1)

    def local_ids(self, ids: Tensor) -> Tensor:
        ids = self.unpack(ids)
        return torch.where(ids < 0, -1, ids - self.first_keys(ids.device).unsqueeze(-1))


def _size(x: Tensor, dim: int) -> int:
    """x.shape[dim], 0 for a scalar, which the op's check refuses."""
    return x.shape[dim] if x.dim() else 0


def _tensor(op: str, name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}")


def _int32(op: str, name: str, x: Tensor) -> Tensor:
    """int32 as the ops want it; int64 outside int32 is clamped to its ends, so that it stays out of range."""
    if x.dtype == torch.int32:
        return x
    if x.dtype != torch.int64:
        raise TypeError(f"{op}: {name} must be torch.int32 or torch.int64, got {x.dtype} {[*x.shape]}")
    return x.clamp(-MAX_ROWS, _INT32_MAX).to(torch.int32)


def _ids(op: str, indices: Tensor, keys: Tensor, batch: _Batch | None, topk_length: Tensor | None = None) -> Tensor:
    _tensor(op, "indices", indices)
    if indices.dtype == torch.int32 and batch is None:
        return indices
    if topk_length is not None:
        _tensor(op, "topk_length", topk_length)
    if _readable(indices, topk_length) and indices.numel() and validates(indices.device):
        _check_local_ids(op, indices, _size(keys, 0) if batch is None else batch.keys, topk_length)
    indices = _int32(op, "indices", indices)
    return indices if batch is None else batch.pack_ids(indices)


def _readable(*tensors: Tensor | None) -> bool:
    """Whether values may be looked at here: not while tracing, under a transform, or where there are none."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or checks.recording():
        return False
    return all(
        x is None or (type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta" and x.layout == torch.strided)
        for x in tensors
    )


def _check_local_ids(op: str, indices: Tensor, num_keys: int, topk_length: Tensor | None) -> None:
    """The op's own check, but for the ids as the caller wrote them: before they are clamped or moved."""
    if indices.dtype not in (torch.int32, torch.int64) or indices.dim() == 0:
        return
    bad = indices >= num_keys
    if topk_length is not None and topk_length.shape == indices.shape[:-1]:
        bad &= torch.arange(indices.shape[-1], device=indices.device) < topk_length[..., None]
    if bad.any():
        raise IndexError(
            f"{op}: indices must be below the number of keys, {num_keys} (or negative for an empty slot), "
            f"got {int(indices[bad][0])}"
        )


def _batch(op: str, q: Tensor, q_rank: int, k_name: str, k: Tensor) -> _Batch | None:
    """The sizes of a batched call, None for a packed one."""
    if q.dim() != q_rank + 1:
        return None
    if k.dim() < 3:
        raise ValueError(
            f"{op}: {k_name} must have shape [B, M, ...] with B = {q.shape[0]} in a batched call, "
            f"got {k.dtype} {[*k.shape]}"
        )
    batch = _Batch(op, q.shape[0], q.shape[1], k.shape[1])
    if checks.beyond_int32(batch.size * batch.keys):
        raise ValueError(f"{op}: {k_name} must have fewer than 2**31 rows in all, got {k.dtype} {[*k.shape]}")
    batch.pack(k_name, k, per_key=True)
    return batch


def _bounds(op: str, starts, ends, q: Tensor, k: Tensor, batch: _Batch | None) -> tuple[Tensor, Tensor]:
    """int32 bounds of the pack; (None, None) is causal."""
    if starts is None and ends is None:
        rows = _size(q, 0) if batch is None else batch.rows
        keys = _size(k, 0) if batch is None else batch.keys
        if rows != keys:
            raise ValueError(
                f"{op}: starts and ends must be given unless there are as many keys as query rows, "
                f"got {rows} rows and {keys} keys"
            )
        ends = torch.arange(1, rows + 1, device=q.device, dtype=torch.int32)
        if batch is None:
            return torch.zeros_like(ends), ends
        first = batch.first_keys(q.device)
        return first.expand(batch.size, rows).flatten(), (first + ends).flatten()
    if starts is None or ends is None:
        missing = "starts" if starts is None else "ends"
        raise ValueError(f"{op}: {missing} must be given when the other bound is, got None")
    _tensor(op, "starts", starts)
    _tensor(op, "ends", ends)
    if batch is None:
        return _int32(op, "starts", starts), _int32(op, "ends", ends)
    return batch.pack_bound("starts", starts), batch.pack_bound("ends", ends)


def _scale(op: str, softmax_scale: float | None, q: Tensor) -> float:
    if softmax_scale is None:
        width = _size(q, -1)
        return width**-0.5 if width > 0 else 1.0  # without a width the op's check refuses q
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float, torch.SymFloat)):
        raise TypeError(f"{op}: softmax_scale must be a float, got {type(softmax_scale).__name__}")
    return softmax_scale


def _count(op: str, name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__}")
    return value


def _flag(op: str, name: str, value: Any) -> None:
    if value is not True and value is not False:
        raise TypeError(f"{op}: {name} must be a bool, got {type(value).__name__}")


def _length(op: str, topk_length: Tensor | None, batch: _Batch | None) -> Tensor | None:
    if topk_length is None:
        return None
    _tensor(op, "topk_length", topk_length)
    topk_length = _int32(op, "topk_length", topk_length)
    return topk_length if batch is None else batch.pack("topk_length", topk_length)


def _call(overload: Any, args: tuple) -> Any:
    """The op's results. Where PyTorch refuses before the op sees its arguments, an error that says why."""
    if torch.compiler.is_compiling():
        return overload(*args)
    try:
        return overload(*args)
    except RuntimeError as error:
        checks.refuse_kinds(overload._opname, overload._schema.arguments, args, error)
        if "setup_context" not in str(error):  # PyTorch's words are about a class that nobody here has written
            raise
        raise RuntimeError(
            f"dsa::{overload._opname} does not support torch.func.grad, vjp and jacrev: use torch.autograd.grad"
        ) from error


# For each function, `_<name>_args` turns its arguments into the op's, so that `explain` sees what would run.


def _indexer_topk_args(q, k, weights, *, starts=None, ends=None, topk, relu=True):
    op = "indexer_topk"
    _tensor(op, "q", q)
    _tensor(op, "k", k)
    _tensor(op, "weights", weights)
    topk = _count(op, "topk", topk)
    _flag(op, "relu", relu)
    batch = _batch(op, q, 3, "k", k)
    starts, ends = _bounds(op, starts, ends, q, k, batch)
    if batch is not None:
        q, k = batch.pack("q", q), batch.pack("k", k, per_key=True)
        weights = batch.pack("weights", weights)
    return (q, k, weights, starts, ends, topk, relu), batch


def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    topk: int,
    relu: bool = True,
) -> IndexerTopkOutput:
    """Score every visible key for every query and keep the best: the lightning indexer with its exact top-k.

    score[t, s] = sum_h weights[t, h] * act(q[t, h] . k[s]), act = relu or identity.

    Args:
        q [T, Hi, Di]: index queries, any floating dtype. Batched: [B, L, Hi, Di].
        k [S, Di]: index keys, same dtype. Batched: [B, M, Di].
        weights [T, Hi]: head weights, q's dtype or float32; fold any further scale (Hi**-0.5 * Di**-0.5) in here.
        starts, ends [T]: int32 or int64; row t sees keys starts[t] <= s < ends[t], clamped to [0, S]. Both None:
            causal, which needs T == S. Batched: [B, L], local to the sequence.
        topk: slots per row (K), at least 1; may exceed S.
        relu: apply relu (gradient 0 at 0) to each head's product.

    Returns:
        IndexerTopkOutput(indices [T, K] int32, scores [T, K] float32, float64 for float64 inputs). A row holds its
        min(K, visible) best keys in ascending id order, then -1 with score -inf. The order that decides: higher score,
        NaN above everything, -0.0 equal to +0.0, ties to the lower id; a visible key with score -inf comes last but
        counts. Exact for every distribution, equal from run to run and for every memory budget.

    Differentiable in q, k and weights, through scores. grad k is summed in an order that can vary from run to run on
    CUDA unless torch.use_deterministic_algorithms(True) is set. Second and forward-mode derivatives raise
    RuntimeError.

    Raises:
        ValueError, TypeError: a shape, device or dtype does not fit; the message names the argument, what was expected
            and what came.

    Source: DeepSeek-V3.2 technical report, section 2.1, equation 1.
    """
    args, batch = _indexer_topk_args(q, k, weights, starts=starts, ends=ends, topk=topk, relu=relu)
    indices, scores = _call(_indexer_topk, args)
    if batch is not None:
        indices, scores = batch.local_ids(indices), batch.unpack(scores)
    return IndexerTopkOutput(indices, scores)


def _indexer_scores_args(q, k, weights, indices, *, relu=True):
    op = "indexer_scores"
    _flag(op, "relu", relu)
    _tensor(op, "q", q)
    _tensor(op, "k", k)
    _tensor(op, "weights", weights)
    batch = _batch(op, q, 3, "k", k)
    indices = _ids(op, indices, k, batch)
    if batch is not None:
        q, k = batch.pack("q", q), batch.pack("k", k, per_key=True)
        weights = batch.pack("weights", weights)
    return (q, k, weights, indices, relu), batch


def indexer_scores(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, *, relu: bool = True) -> Tensor:
    """Index scores of given keys, for indices that come from another layer or a replay.

    Args:
        q, k, weights, relu: as for `indexer_topk`.
        indices [T, K]: int32 or int64 key rows; a slot < 0 is empty; >= S too, on CUDA. Batched: [B, L, K], local ids.

    Returns:
        scores [T, K] float32 (float64 for float64 inputs), -inf in empty slots, whose gradient is ignored.

    Differentiable in q, k and weights; the notes of `indexer_topk` hold.

    Raises:
        ValueError, TypeError: a shape, device or dtype does not fit.
        IndexError: an id >= S on CPU (on CUDA with DSA_OPS_VALIDATE=1, which syncs).

    Source: DeepSeek-V3.2 technical report, section 2.1, equation 1.
    """
    args, batch = _indexer_scores_args(q, k, weights, indices, relu=relu)
    scores = _call(_indexer_scores, args)
    return scores if batch is None else batch.unpack(scores)


def _sparse_mla_args(q, kv, indices, softmax_scale=None, d_v=None, *, sink=None, topk_length=None):
    op = "sparse_mla"
    _tensor(op, "q", q)
    _tensor(op, "kv", kv)
    if sink is not None:
        _tensor(op, "sink", sink)
    batch = _batch(op, q, 3, "kv", kv)
    indices = _ids(op, indices, kv, batch, topk_length)
    topk_length = _length(op, topk_length, batch)
    softmax_scale = _scale(op, softmax_scale, q)
    d_v = _size(q, -1) if d_v is None else _count(op, "d_v", d_v)
    if batch is not None:
        q, kv = batch.pack("q", q), batch.pack("kv", kv, per_key=True)
    return (q, kv, indices, softmax_scale, d_v, sink, topk_length), batch


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    softmax_scale: float | None = None,
    d_v: int | None = None,
    *,
    sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> SparseMLAOutput:
    """Attention of every query over its own selected keys, with one latent key/value row shared by all heads.

    Args:
        q [T, H, D]: queries, any floating dtype. Batched: [B, L, H, D].
        kv [S, D]: latent rows, key and value at once; the value is the first Dv columns. Same dtype.
            Batched: [B, M, D].
        indices [T, K]: int32 or int64 key rows. A slot < 0, or at or past topk_length[t], is empty; an id >= S too, on
            CUDA. An id listed twice counts twice. Batched: [B, L, K], local ids.
        softmax_scale: multiplies q . kv before the softmax; default D ** -0.5. A compiled caller recompiles per value.
        d_v: Dv; default D.
        sink [H]: logit added to the denominator of out only, in natural-log units.
        topk_length [T]: int32 or int64, leading slots in use per row, clamped to [0, K]. Batched: [B, L].

    Returns:
        SparseMLAOutput(out [T, H, Dv] in q's dtype, lse [T, H] float32, float64 for float64 q): lse is the natural
        logarithm of the sum over the selected keys, scale included, sink excluded. Rows without keys: out 0, lse -inf.

    Differentiable in q, kv and sink, through out and lse. grad kv and grad sink are summed in an order that can vary
    from run to run on CUDA unless torch.use_deterministic_algorithms(True) is set. Second and forward-mode derivatives
    raise RuntimeError.

    Raises:
        ValueError, TypeError: a shape, device or dtype does not fit; the message names the argument, what was expected
            and what came.
        IndexError: an id >= S in a slot in use, on CPU (on CUDA with DSA_OPS_VALIDATE=1, which syncs).

    Source: DeepSeek-V3.2 technical report, section 2.1, equation 2; multi-head latent attention in its absorbed form
    (DeepSeek-V2 technical report, section 2.1).
    """
    args, batch = _sparse_mla_args(q, kv, indices, softmax_scale, d_v, sink=sink, topk_length=topk_length)
    out, lse = _call(_sparse_mla, args)
    if batch is not None:
        out, lse = batch.unpack(out), batch.unpack(lse)
    return SparseMLAOutput(out, lse)


def _attention_target_args(q, kv, lse, indices, softmax_scale=None, *, topk_length=None):
    return _target_args("attention_target", q, kv, lse, indices, softmax_scale, topk_length)


def _target_args(op, q, kv, lse, indices, softmax_scale, topk_length=None):
    """For `attention_target` and for `indexer_loss`, which goes by its own name in errors."""
    _tensor(op, "q", q)
    _tensor(op, "kv", kv)
    _tensor(op, "lse", lse)
    batch = _batch(op, q, 3, "kv", kv)
    indices = _ids(op, indices, kv, batch, topk_length)
    topk_length = _length(op, topk_length, batch)
    softmax_scale = _scale(op, softmax_scale, q)
    if batch is not None:
        q, kv, lse = batch.pack("q", q), batch.pack("kv", kv, per_key=True), batch.pack("lse", lse)
    return (q, kv, lse, indices, softmax_scale, topk_length), batch


def attention_target(
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    indices: Tensor,
    softmax_scale: float | None = None,
    *,
    topk_length: Tensor | None = None,
) -> Tensor:
    """What the indexer is taught: attention probabilities on the selected keys, summed over this rank's heads.

    target[t, j] = sum_h exp(softmax_scale * q[t, h] . kv[indices[t, j]] - lse[t, h])

    Args:
        q, kv, indices, softmax_scale, topk_length: as for `sparse_mla`.
        lse [T, H]: what `sparse_mla` returned for them; float32, float64 for float64 q. Batched: [B, L, H].

    Returns:
        target [T, K] in lse's dtype, 0 in empty slots; not normalised, so that tensor-parallel ranks can be summed
        first.

    Not differentiable: the teacher gets no gradient.

    Raises:
        ValueError, TypeError, IndexError: as for `sparse_mla`.

    Source: DeepSeek-V3.2 technical report, section 2.1.1 (the target of the indexer's loss).
    """
    args, batch = _attention_target_args(q, kv, lse, indices, softmax_scale, topk_length=topk_length)
    target = _call(_attention_target, args)
    return target if batch is None else batch.unpack(target)


def _indexer_kl_args(target, scores, indices):
    op = "indexer_kl"
    _tensor(op, "target", target)
    _tensor(op, "scores", scores)
    _tensor(op, "indices", indices)
    indices = _int32(op, "indices", indices)
    if target.dim() != 3:
        return (target, scores, indices), None
    batch = _Batch(op, target.shape[0], target.shape[1], 0)
    return (batch.pack("target", target), batch.pack("scores", scores), batch.pack("indices", indices)), batch


def indexer_kl(target: Tensor, scores: Tensor, indices: Tensor) -> Tensor:
    """KL divergence of the indexer's distribution over the selected keys from the attention target, row by row.

    p = softmax(scores), t = target / sum(target) over the slots with indices >= 0; kl = sum_j t_j (log t_j - log p_j).

    Args:
        target [T, K]: from `attention_target`, summed over tensor-parallel ranks. Batched: [B, L, K].
        scores [T, K]: from `indexer_topk` or `indexer_scores`, same dtype.
        indices [T, K]: int32 or int64; only the sign is looked at. With a topk_length write -1 past it first
            (`layouts.expand_topk`).

    Returns:
        kl [T] float32 (float64 for float64), in nats. A row without a valid slot, or whose target sums to less than
        1e-10, is empty: kl 0, gradient 0.

    Differentiable in scores: the gradient is p - t, exactly, also where t is tiny. Second and forward-mode derivatives
    raise RuntimeError.

    Raises:
        ValueError, TypeError: a shape, device or dtype does not fit.

    Source: DeepSeek-V3.2 technical report, section 2.1.1, equation 4.
    """
    args, batch = _indexer_kl_args(target, scores, indices)
    kl = _call(_indexer_kl, args)
    return kl if batch is None else batch.unpack(kl)


def _dense_indexer_kl_args(
    index_q,
    index_k,
    index_weights,
    q,
    k,
    lse,
    *,
    starts=None,
    ends=None,
    softmax_scale=None,
    row_weight=None,
    relu=True,
    total_heads=None,
):
    op = "dense_indexer_kl"
    _tensor(op, "index_q", index_q)
    _tensor(op, "index_k", index_k)
    _tensor(op, "index_weights", index_weights)
    _tensor(op, "q", q)
    _tensor(op, "k", k)
    _tensor(op, "lse", lse)
    if row_weight is not None:
        _tensor(op, "row_weight", row_weight)
    softmax_scale = _scale(op, softmax_scale, q)
    _flag(op, "relu", relu)
    total_heads = 0 if total_heads is None else _count(op, "total_heads", total_heads)
    batch = _batch(op, index_q, 3, "index_k", index_k)
    starts, ends = _bounds(op, starts, ends, index_q, index_k, batch)
    if batch is not None:
        index_q, index_k = batch.pack("index_q", index_q), batch.pack("index_k", index_k, per_key=True)
        index_weights = batch.pack("index_weights", index_weights)
        q, k, lse = batch.pack("q", q), batch.pack("k", k, per_key=True), batch.pack("lse", lse)
        row_weight = None if row_weight is None else batch.pack("row_weight", row_weight)
    if row_weight is None:
        dtype = torch.float64 if index_q.dtype == torch.float64 else torch.float32
        rows = _size(index_q, 0)
        row_weight = torch.ones(rows, dtype=dtype, device=index_q.device) / max(rows, 1)
    args = (index_q, index_k, index_weights, q, k, lse, starts, ends, softmax_scale, row_weight, relu, total_heads)
    return args, batch


def dense_indexer_kl(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    softmax_scale: float | None = None,
    row_weight: Tensor | None = None,
    relu: bool = True,
    total_heads: int | None = None,
) -> DenseIndexerKLOutput:
    """The warm-up loss: KL of the indexer's distribution over every visible key from full attention's, streamed.

    Args:
        index_q [T, Hi, Di], index_k [S, Di], index_weights [T, Hi]: the indexer, as for `indexer_topk`.
        q [T, H, D]: attention queries; k [S, D], the latent shared by the heads, or [S, H, D], expanded. One dtype.
        lse [T, H]: full attention's own, over exactly the visible keys, sink left out; float32, float64 for float64 q.
        starts, ends: as for `indexer_topk`.
        softmax_scale: default D ** -0.5.
        row_weight [T]: what each row's kl counts in the loss; default one over the number of rows. A row of weight 0
            has no part in loss and gradients, whatever its kl.
        relu: as for `indexer_topk`.
        total_heads: attention heads over all tensor-parallel ranks; None or 0 means H. With more than H the op gives
            this rank's share: the cross entropy without the entropy term, and gradients that sum over the ranks to
            the exact ones.
        Batched: [B, L, ...] for queries, lse, bounds and row_weight, [B, M, ...] for keys.

    Returns:
        DenseIndexerKLOutput(loss [] = sum_t row_weight[t] * kl[t], kl [T]), float32 (float64 for float64), in nats.
        Rows without a visible key give 0.

    Differentiable in index_q, index_k and index_weights, through loss alone. Second and forward-mode derivatives raise
    RuntimeError.

    Raises:
        ValueError, TypeError: a shape, device or dtype does not fit.

    Source: DeepSeek-V3.2 technical report, section 2.1.1, equation 3 (dense warm-up stage).
    """
    args, batch = _dense_indexer_kl_args(
        index_q,
        index_k,
        index_weights,
        q,
        k,
        lse,
        starts=starts,
        ends=ends,
        softmax_scale=softmax_scale,
        row_weight=row_weight,
        relu=relu,
        total_heads=total_heads,
    )
    loss, kl = _call(_dense_indexer_kl, args)
    return DenseIndexerKLOutput(loss, kl if batch is None else batch.unpack(kl))


_ARGS: dict[str, Callable[..., tuple[tuple, _Batch | None]]] = {
    "indexer_topk": _indexer_topk_args,
    "indexer_scores": _indexer_scores_args,
    "sparse_mla": _sparse_mla_args,
    "attention_target": _attention_target_args,
    "indexer_kl": _indexer_kl_args,
    "dense_indexer_kl": _dense_indexer_kl_args,
}


for _name, _function in _ARGS.items():
    _function.__qualname__ = _name  # what Python calls it where an argument is missing


def explain(op: str, *args: Any, **kwargs: Any) -> dispatch.Explanation:
    """Which backend and kernel a call would run on, and why each other one refuses; nothing is run.

    Args:
        op: name of a public function ("sparse_mla"), whose arguments follow, or of a backward op
            ("sparse_mla_backward"), with the arguments of torch.ops.dsa.<op>.

    Returns:
        Explanation(op, backend, kernel, refusals); `print` it for a readable answer.
    """
    if not isinstance(op, str):
        raise TypeError(f"explain: op must be a str, got {type(op).__name__}")
    if op in _ARGS:
        op_args, _ = _ARGS[op](*args, **kwargs)
        return _explain(op, op_args)
    if op not in dispatch.KERNELS:
        raise ValueError(f"explain: op must be one of {', '.join(sorted(dispatch.KERNELS))}, got {op!r}")
    arguments = getattr(torch.ops.dsa, op).default._schema.arguments
    given = {**{a.name: x for a, x in zip(arguments, args, strict=False)}, **kwargs}
    missing = [a.name for a in arguments if a.name not in given and not a.has_default_value()]
    if missing or len(given) != len(args) + len(kwargs) or given.keys() - {a.name for a in arguments}:
        raise TypeError(f"explain: {op} takes {', '.join(a.name for a in arguments)}; got {', '.join(given)}")
    return _explain(op, tuple(given.get(a.name, a.default_value) for a in arguments))


def _explain(op: str, op_args: tuple) -> dispatch.Explanation:
    if not torch.compiler.is_compiling():
        checks.refuse_kinds(op, getattr(torch.ops.dsa, op).default._schema.arguments, op_args)
    device = next(x.device.type for x in op_args if isinstance(x, Tensor))
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        op_args = autocast_arguments(op, device, op_args)
    getattr(checks, f"check_{op}")(*op_args)  # what the op would refuse has no backend
    return dispatch.explain_op(op, op_args)
