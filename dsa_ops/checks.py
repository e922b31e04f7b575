"""Argument checks, one function per op, run by the op's body and by its fake alike.

Everything here looks at ranks, sizes, dtypes and devices only, so it costs no host sync and traces with symbolic sizes.
`check_ids` is the one check of values: bodies call it, fakes cannot.
"""

import os

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MAX_ROWS = 2**31  # key ids are int32


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for every other dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _got(x: Tensor) -> str:
    return f"{x.dtype} {[*x.shape]}"


def _wrong_shape(op: str, name: str, x: Tensor, labels: str, sizes: tuple) -> ValueError:
    known = ", ".join(
        f"{label} = {size}" for label, size in zip(labels.split(", "), sizes, strict=True) if size is not None
    )
    where = f" with {known}" if known else ""
    return ValueError(f"{op}: {name} must have shape [{labels}]{where}, got {_got(x)}")


def _shape(op: str, name: str, x: Tensor, labels: str, *sizes: int | None) -> None:
    """Rank and sizes; a size None is free."""
    shape = x.shape
    if len(shape) != len(sizes):
        raise _wrong_shape(op, name, x, labels, sizes)
    for got, want in zip(shape, sizes, strict=True):
        if want is not None and got != want:
            raise _wrong_shape(op, name, x, labels, sizes)


def _dtype(op: str, name: str, x: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if x.dtype not in allowed:
        names = " or ".join(str(d) for d in allowed)
        raise TypeError(f"{op}: {name} must be {names}, got {_got(x)}")


def _same_device(op: str, first: str, x: Tensor, **others: Tensor | None) -> None:
    device = x.device
    for name, other in others.items():
        if other is not None and other.device != device:
            raise ValueError(f"{op}: {name} must be on {device} like {first}, got {other.device}")


def _at_least_one(op: str, name: str, label: str, size: int, x: Tensor) -> None:
    if size < 1:
        raise ValueError(f"{op}: {name} must have {label} >= 1, got {_got(x)}")


def _key_rows(op: str, name: str, x: Tensor) -> None:
    if x.shape[0] >= MAX_ROWS:
        raise ValueError(f"{op}: {name} must have fewer than 2**31 rows (ids are int32), got {_got(x)}")


def _bounds(op: str, starts: Tensor, ends: Tensor, rows: int) -> None:
    for name, bound in (("starts", starts), ("ends", ends)):
        _dtype(op, name, bound, (torch.int32,))
        _shape(op, name, bound, "T", rows)


def _slots(op: str, indices: Tensor, rows: int) -> None:
    _dtype(op, "indices", indices, (torch.int32,))
    _shape(op, "indices", indices, "T, K", rows, None)
    _at_least_one(op, "indices", "K", indices.shape[1], indices)


def _index_inputs(op: str, q: Tensor, k: Tensor, weights: Tensor, prefix: str = "") -> int:
    """Index queries, keys and head weights; returns T."""
    q_name, k_name, w_name = f"{prefix}q", f"{prefix}k", f"{prefix}weights"
    _dtype(op, q_name, q, FLOATS)
    _shape(op, q_name, q, "T, Hi, Di", None, None, None)
    rows, heads, width = q.shape
    _at_least_one(op, q_name, "Hi", heads, q)
    _at_least_one(op, q_name, "Di", width, q)
    _dtype(op, k_name, k, (q.dtype,))
    _shape(op, k_name, k, "S, Di", None, width)
    _key_rows(op, k_name, k)
    _dtype(op, w_name, weights, (q.dtype,) if q.dtype == torch.float32 else (q.dtype, torch.float32))
    _shape(op, w_name, weights, "T, Hi", rows, heads)
    return rows


def _attention_inputs(op: str, q: Tensor, kv: Tensor) -> tuple[int, int, int]:
    _dtype(op, "q", q, FLOATS)
    _shape(op, "q", q, "T, H, D", None, None, None)
    rows, heads, width = q.shape
    _at_least_one(op, "q", "H", heads, q)
    _at_least_one(op, "q", "D", width, q)
    _dtype(op, "kv", kv, (q.dtype,))
    _shape(op, "kv", kv, "S, D", None, width)
    _key_rows(op, "kv", kv)
    return rows, heads, width


def _lse(op: str, lse: Tensor, q: Tensor) -> None:
    _dtype(op, "lse", lse, (accumulation_dtype(q.dtype),))
    _shape(op, "lse", lse, "T, H", q.shape[0], q.shape[1])


def _topk_length(op: str, topk_length: Tensor | None, rows: int) -> None:
    if topk_length is not None:
        _dtype(op, "topk_length", topk_length, (torch.int32,))
        _shape(op, "topk_length", topk_length, "T", rows)


def _gradient(op: str, name: str, grad: Tensor | None, labels: str, like: Tensor) -> None:
    if grad is not None:
        _dtype(op, name, grad, FLOATS)
        _shape(op, name, grad, labels, *like.shape)


def check_indexer_topk(q, k, weights, starts, ends, topk, relu=True):
    op = "indexer_topk"
    rows = _index_inputs(op, q, k, weights)
    _bounds(op, starts, ends, rows)
    if topk < 1:
        raise ValueError(f"{op}: topk must be at least 1, got {topk}")
    if topk >= MAX_ROWS:
        raise ValueError(f"{op}: topk must be below 2**31, got {topk}")
    _same_device(op, "q", q, k=k, weights=weights, starts=starts, ends=ends)


def check_indexer_scores(q, k, weights, indices, relu=True, op="indexer_scores"):
    rows = _index_inputs(op, q, k, weights)
    _slots(op, indices, rows)
    _same_device(op, "q", q, k=k, weights=weights, indices=indices)


def check_indexer_scores_backward(
    grad_scores, q, k, weights, indices, relu=True, need_q=True, need_k=True, need_weights=True
):
    op = "indexer_scores_backward"
    check_indexer_scores(q, k, weights, indices, relu, op=op)
    _gradient(op, "grad_scores", grad_scores, "T, K", indices)
    _same_device(op, "q", q, grad_scores=grad_scores)


def check_sparse_mla(q, kv, indices, softmax_scale, d_v, sink=None, topk_length=None, op="sparse_mla"):
    rows, heads, width = _attention_inputs(op, q, kv)
    _slots(op, indices, rows)
    if d_v < 1 or d_v > width:
        raise ValueError(f"{op}: d_v must be between 1 and D = {width}, got {d_v}")
    if sink is not None:
        _dtype(op, "sink", sink, FLOATS if q.dtype == torch.float64 else FLOATS[:3])
        _shape(op, "sink", sink, "H", heads)
    _topk_length(op, topk_length, rows)
    _same_device(op, "q", q, kv=kv, indices=indices, sink=sink, topk_length=topk_length)


def check_sparse_mla_backward(
    grad_out,
    grad_lse,
    q,
    kv,
    indices,
    out,
    lse,
    softmax_scale,
    d_v,
    sink=None,
    topk_length=None,
    need_q=True,
    need_kv=True,
    need_sink=True,
):
    op = "sparse_mla_backward"
    check_sparse_mla(q, kv, indices, softmax_scale, d_v, sink, topk_length, op=op)
    _dtype(op, "out", out, (q.dtype,))
    _shape(op, "out", out, "T, H, Dv", q.shape[0], q.shape[1], d_v)
    _lse(op, lse, q)
    _gradient(op, "grad_out", grad_out, "T, H, Dv", out)
    _gradient(op, "grad_lse", grad_lse, "T, H", lse)
    _same_device(op, "q", q, out=out, lse=lse, grad_out=grad_out, grad_lse=grad_lse)


def check_attention_target(q, kv, lse, indices, softmax_scale, topk_length=None):
    op = "attention_target"
    rows, _, _ = _attention_inputs(op, q, kv)
    _lse(op, lse, q)
    _slots(op, indices, rows)
    _topk_length(op, topk_length, rows)
    _same_device(op, "q", q, kv=kv, lse=lse, indices=indices, topk_length=topk_length)


def check_indexer_kl(target, scores, indices, op="indexer_kl"):
    _dtype(op, "target", target, FLOATS)
    _shape(op, "target", target, "T, K", None, None)
    _at_least_one(op, "target", "K", target.shape[1], target)
    _dtype(op, "scores", scores, (target.dtype,))
    _shape(op, "scores", scores, "T, K", *target.shape)
    _dtype(op, "indices", indices, (torch.int32,))
    _shape(op, "indices", indices, "T, K", *target.shape)
    _same_device(op, "target", target, scores=scores, indices=indices)


def check_indexer_kl_backward(grad_kl, target, scores, indices):
    op = "indexer_kl_backward"
    check_indexer_kl(target, scores, indices, op=op)
    _gradient(op, "grad_kl", grad_kl, "T", target[:, 0])
    _same_device(op, "target", target, grad_kl=grad_kl)


def check_dense_indexer_kl(
    index_q,
    index_k,
    index_weights,
    q,
    k,
    lse,
    starts,
    ends,
    softmax_scale,
    row_weight,
    relu=True,
    total_heads=0,
    op="dense_indexer_kl",
):
    rows = _index_inputs(op, index_q, index_k, index_weights, prefix="index_")
    keys = index_k.shape[0]
    _dtype(op, "q", q, FLOATS)
    _shape(op, "q", q, "T, H, D", rows, None, None)
    _, heads, width = q.shape
    _at_least_one(op, "q", "H", heads, q)
    _at_least_one(op, "q", "D", width, q)
    _dtype(op, "k", k, (q.dtype,))
    if k.dim() == 3:
        _shape(op, "k", k, "S, H, D", keys, heads, width)
    elif k.dim() == 2:
        _shape(op, "k", k, "S, D", keys, width)
    else:
        raise ValueError(
            f"{op}: k must have shape [S, D] or [S, H, D] with S = {keys}, H = {heads}, D = {width}, got {_got(k)}"
        )
    if (q.dtype == torch.float64) != (index_q.dtype == torch.float64):
        raise TypeError(
            f"{op}: q and index_q must be both float64 or neither, got q {q.dtype} and index_q {index_q.dtype}"
        )
    _lse(op, lse, q)
    _bounds(op, starts, ends, rows)
    _dtype(op, "row_weight", row_weight, FLOATS if index_q.dtype == torch.float64 else FLOATS[:3])
    _shape(op, "row_weight", row_weight, "T", rows)
    if total_heads != 0 and total_heads < heads:
        raise ValueError(f"{op}: total_heads must be 0 or at least H = {heads}, got {total_heads}")
    _same_device(
        op,
        "index_q",
        index_q,
        index_k=index_k,
        index_weights=index_weights,
        q=q,
        k=k,
        lse=lse,
        starts=starts,
        ends=ends,
        row_weight=row_weight,
    )


def check_dense_indexer_kl_backward(
    grad_loss,
    index_q,
    index_k,
    index_weights,
    q,
    k,
    lse,
    starts,
    ends,
    softmax_scale,
    row_weight,
    relu=True,
    total_heads=0,
    need_q=True,
    need_k=True,
    need_weights=True,
):
    op = "dense_indexer_kl_backward"
    check_dense_indexer_kl(
        index_q,
        index_k,
        index_weights,
        q,
        k,
        lse,
        starts,
        ends,
        softmax_scale,
        row_weight,
        relu,
        total_heads,
        op=op,
    )
    _dtype(op, "grad_loss", grad_loss, FLOATS)
    if grad_loss.dim() != 0:
        raise ValueError(f"{op}: grad_loss must be a scalar of shape [], got {_got(grad_loss)}")
    _same_device(op, "index_q", index_q, grad_loss=grad_loss)


def validates(device: torch.device) -> bool:
    """Whether values are checked: always on CPU, elsewhere only with DSA_OPS_VALIDATE=1 (it costs a host sync)."""
    return device.type == "cpu" or os.environ.get("DSA_OPS_VALIDATE", "0") not in ("", "0")


def check_ids(op: str, indices: Tensor, num_keys: int, topk_length: Tensor | None = None) -> None:
    """IndexError for an id >= num_keys in a slot that is in use."""
    if indices.numel() == 0 or not validates(indices.device) or int(indices.max()) < num_keys:
        return
    bad = indices >= num_keys
    if topk_length is not None:
        bad &= torch.arange(indices.shape[1], device=indices.device) < topk_length[:, None]
    if bad.any():
        row, slot = bad.nonzero()[0].tolist()
        raise IndexError(
            f"{op}: indices must be below S = {num_keys} (or negative for an empty slot), "
            f"got {int(indices[row, slot])} in row {row}, slot {slot}"
        )
