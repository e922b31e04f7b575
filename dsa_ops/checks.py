"""Argument checks, one function per op, run by the op's body and by its fake alike.

Everything here looks at ranks, sizes, dtypes and devices only, so it costs no host sync and traces with symbolic sizes.
`check_ids` is the one check of values: bodies call it, fakes cannot.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INT32 = (torch.int32,)
MAX_ROWS = 2**31  # key ids are int32


def beyond_int32(size: int) -> bool:
    """Whether ids below `size` do not all fit in int32. Not asked of a symbol, since the op's body will ask again.

    So the limit is no guard of a compiled graph and no constraint of an exported program.
    """
    return isinstance(size, int) and size >= MAX_ROWS


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for every other dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _got(x: Tensor) -> str:
    return f"{x.dtype} {[*x.shape]}"


def _expect(
    op: str,
    name: str,
    x: Tensor,
    dtypes: tuple[torch.dtype, ...],
    like: tuple[str, torch.device] | None,
    labels: str,
    *sizes: int | None,
) -> torch.Size:
    """Check dtype, device (that of the argument named in `like`), rank and sizes (None is free); returns the shape."""
    if x.dtype not in dtypes:
        raise TypeError(f"{op}: {name} must be {' or '.join(map(str, dtypes))}, got {_got(x)}")
    shape = x.shape
    if shape != sizes:  # one comparison is quicker than one for each size; it cannot hold where a size is free
        if len(shape) != len(sizes):
            raise _wrong_shape(op, name, x, labels, sizes)
        for got, want in zip(shape, sizes):  # noqa: B905  (equal lengths; strict costs time on a hot path)
            if want is not None and got != want:
                raise _wrong_shape(op, name, x, labels, sizes)
    if like is not None and x.device != like[1]:
        raise ValueError(f"{op}: {name} must be on {like[1]} like {like[0]}, got {x.device}")
    return shape


def _wrong_shape(op: str, name: str, x: Tensor, labels: str, sizes: tuple) -> ValueError:
    pairs = zip(filter(None, labels.split(", ")), sizes, strict=True)
    known = ", ".join(f"{label} = {size}" for label, size in pairs if size is not None)
    where = f" with {known}" if known else ""
    return ValueError(f"{op}: {name} must have shape [{labels}]{where}, got {_got(x)}")


def _too_small(op: str, name: str, label: str, x: Tensor) -> ValueError:
    return ValueError(f"{op}: {name} must have {label} >= 1, got {_got(x)}")


def _too_many_keys(op: str, name: str, x: Tensor) -> ValueError:
    return ValueError(f"{op}: {name} must have fewer than 2**31 rows (ids are int32), got {_got(x)}")


def _weights_like(x: Tensor) -> tuple[torch.dtype, ...]:
    """Dtypes of factors that are used in the accumulation dtype: nothing wider than that."""
    return FLOATS if x.dtype == torch.float64 else FLOATS[:3]


def _slots(op: str, indices: Tensor, like: tuple[str, torch.device], rows: int) -> torch.Size:
    shape = _expect(op, "indices", indices, INT32, like, "T, K", rows, None)
    if shape[1] < 1:
        raise _too_small(op, "indices", "K", indices)
    return shape


def _index_inputs(op: str, q: Tensor, k: Tensor, weights: Tensor, prefix: str = "") -> tuple[int, int]:
    """Index queries, keys and head weights; returns T and S."""
    q_name, k_name = prefix + "q", prefix + "k"
    like = (q_name, q.device)
    rows, heads, width = _expect(op, q_name, q, FLOATS, None, "T, Hi, Di", None, None, None)
    if heads < 1 or width < 1:
        raise _too_small(op, q_name, "Hi" if heads < 1 else "Di", q)
    keys, _ = _expect(op, k_name, k, (q.dtype,), like, "S, Di", None, width)
    if beyond_int32(keys):
        raise _too_many_keys(op, k_name, k)
    dtypes = (q.dtype,) if q.dtype == torch.float32 else (q.dtype, torch.float32)
    _expect(op, prefix + "weights", weights, dtypes, like, "T, Hi", rows, heads)
    return rows, keys


def _attention_inputs(op: str, q: Tensor, kv: Tensor) -> tuple[torch.Size, tuple[str, torch.device]]:
    """Queries and latent keys; returns q's shape and what other arguments are compared with for their device."""
    like = ("q", q.device)
    shape = _expect(op, "q", q, FLOATS, None, "T, H, D", None, None, None)
    _, heads, width = shape
    if heads < 1 or width < 1:
        raise _too_small(op, "q", "H" if heads < 1 else "D", q)
    keys, _ = _expect(op, "kv", kv, (q.dtype,), like, "S, D", None, width)
    if beyond_int32(keys):
        raise _too_many_keys(op, "kv", kv)
    return shape, like


def check_indexer_topk(q, k, weights, starts, ends, topk, relu=True):
    op = "indexer_topk"
    rows, _ = _index_inputs(op, q, k, weights)
    like = ("q", q.device)
    _expect(op, "starts", starts, INT32, like, "T", rows)
    _expect(op, "ends", ends, INT32, like, "T", rows)
    if topk < 1:
        raise ValueError(f"{op}: topk must be at least 1, got {topk}")
    if beyond_int32(topk):
        raise ValueError(f"{op}: topk must be below 2**31, got {topk}")


def check_indexer_scores(q, k, weights, indices, relu=True, op="indexer_scores"):
    rows, _ = _index_inputs(op, q, k, weights)
    _slots(op, indices, ("q", q.device), rows)


def check_indexer_scores_backward(
    grad_scores, q, k, weights, indices, relu=True, need_q=True, need_k=True, need_weights=True
):
    op = "indexer_scores_backward"
    check_indexer_scores(q, k, weights, indices, relu, op=op)
    _expect(op, "grad_scores", grad_scores, FLOATS, ("q", q.device), "T, K", *indices.shape)


def check_sparse_mla(q, kv, indices, softmax_scale, d_v, sink=None, topk_length=None, op="sparse_mla"):
    (rows, heads, width), like = _attention_inputs(op, q, kv)
    _slots(op, indices, like, rows)
    if d_v < 1 or d_v > width:
        raise ValueError(f"{op}: d_v must be between 1 and D = {width}, got {d_v}")
    if sink is not None:
        _expect(op, "sink", sink, _weights_like(q), like, "H", heads)
    if topk_length is not None:
        _expect(op, "topk_length", topk_length, INT32, like, "T", rows)


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
    rows, heads, _ = q.shape
    like = ("q", q.device)
    _expect(op, "out", out, (q.dtype,), like, "T, H, Dv", rows, heads, d_v)
    _expect(op, "lse", lse, (accumulation_dtype(q.dtype),), like, "T, H", rows, heads)
    if grad_out is not None:
        _expect(op, "grad_out", grad_out, FLOATS, like, "T, H, Dv", rows, heads, d_v)
    if grad_lse is not None:
        _expect(op, "grad_lse", grad_lse, FLOATS, like, "T, H", rows, heads)


def check_attention_target(q, kv, lse, indices, softmax_scale, topk_length=None, op="attention_target"):
    (rows, heads, _), like = _attention_inputs(op, q, kv)
    _expect(op, "lse", lse, (accumulation_dtype(q.dtype),), like, "T, H", rows, heads)
    _slots(op, indices, like, rows)
    if topk_length is not None:
        _expect(op, "topk_length", topk_length, INT32, like, "T", rows)


def check_indexer_kl(target, scores, indices, op="indexer_kl"):
    like = ("target", target.device)
    rows, slots = _expect(op, "target", target, FLOATS, None, "T, K", None, None)
    if slots < 1:
        raise _too_small(op, "target", "K", target)
    _expect(op, "scores", scores, (target.dtype,), like, "T, K", rows, slots)
    _expect(op, "indices", indices, INT32, like, "T, K", rows, slots)


def check_indexer_kl_backward(grad_kl, target, scores, indices):
    op = "indexer_kl_backward"
    check_indexer_kl(target, scores, indices, op=op)
    _expect(op, "grad_kl", grad_kl, FLOATS, ("target", target.device), "T", target.shape[0])


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
    rows, keys = _index_inputs(op, index_q, index_k, index_weights, prefix="index_")
    like = ("index_q", index_q.device)
    _, heads, width = _expect(op, "q", q, FLOATS, like, "T, H, D", rows, None, None)
    if heads < 1 or width < 1:
        raise _too_small(op, "q", "H" if heads < 1 else "D", q)
    if (q.dtype == torch.float64) != (index_q.dtype == torch.float64):
        raise TypeError(f"{op}: q must be float64 exactly where index_q is ({index_q.dtype}), got {_got(q)}")
    if k.dim() == 3:
        _expect(op, "k", k, (q.dtype,), like, "S, H, D", keys, heads, width)
    elif k.dim() == 2:
        _expect(op, "k", k, (q.dtype,), like, "S, D", keys, width)
    else:
        sizes = f"S = {keys}, H = {heads}, D = {width}"
        raise ValueError(f"{op}: k must have shape [S, D] or [S, H, D] with {sizes}, got {_got(k)}")
    _expect(op, "lse", lse, (accumulation_dtype(q.dtype),), like, "T, H", rows, heads)
    _expect(op, "starts", starts, INT32, like, "T", rows)
    _expect(op, "ends", ends, INT32, like, "T", rows)
    _expect(op, "row_weight", row_weight, _weights_like(index_q), like, "T", rows)
    if total_heads != 0 and total_heads < heads:
        raise ValueError(f"{op}: total_heads must be 0 or at least H = {heads}, got {total_heads}")


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
    inputs = (index_q, index_k, index_weights, q, k, lse, starts, ends, softmax_scale, row_weight, relu, total_heads)
    check_dense_indexer_kl(*inputs, op=op)
    _expect(op, "grad_loss", grad_loss, FLOATS, ("index_q", index_q.device), "")


def check_strided(op: str, name: str, x: Tensor, cause: Exception | None = None) -> None:
    if x.layout != torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout)
        raise TypeError(f"{op}: {name} must be a strided tensor, got a {kind} one") from cause


def refuse_kinds(op: str, arguments: Sequence[Any], args: tuple, cause: Exception | None = None) -> None:
    """Raises where an argument is not the kind of thing its schema says: no tensor, not strided, beyond 64 bits.

    Too dear for every call, so asked once a call has failed otherwise (with `cause`), and while tracing.
    """
    for argument, x in zip(arguments, args, strict=False):
        if isinstance(x, Tensor):
            check_strided(op, argument.name, x, cause)
        elif str(argument.type) == "Tensor":
            raise TypeError(f"{op}: {argument.name} must be a torch.Tensor, got {type(x).__name__}") from cause
        elif isinstance(x, int) and not -(2**63) <= x < 2**63:
            raise ValueError(f"{op}: {argument.name} must fit in 64 bits, got {x}") from cause


def recording() -> bool:
    """Whether operations on plain tensors are written into a graph (make_fx, torch.func.linearize).

    No value can be read then; nor can one in a FakeTensorMode.
    """
    keys, active = torch._C._TorchDispatchModeKey, torch._C._get_dispatch_mode
    return active(keys.PROXY) is not None or active(keys.FAKE) is not None


def validates(device: torch.device) -> bool:
    """Whether values are checked: always on CPU, elsewhere only with DSA_OPS_VALIDATE=1 (it costs a host sync)."""
    if device.type == "cpu":
        return True
    setting = os.environ.get("DSA_OPS_VALIDATE") or "0"
    if setting not in ("0", "1"):
        raise ValueError(f"DSA_OPS_VALIDATE must be 0 or 1, got {setting!r}")
    return setting == "1"


def check_ids(op: str, indices: Tensor, num_keys: int, topk_length: Tensor | None = None) -> None:
    """IndexError for an id >= num_keys in a slot that is in use."""
    if indices.numel() == 0 or not validates(indices.device) or indices.max().item() < num_keys:
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
