"""Attention over every visible key, for the dense and the warm-up stage: plain torch, bounded memory.

Shapes: B sequences, L query rows, S key rows, H heads, D query/key width, V value width. Bounds are [B, L] and local to
their sequence. Nothing here holds [L, S] for all rows at once, forward or backward.

No indexing, `contiguous` or `~`: they ask the driver for the device, which there may be none of for fake CUDA tensors.
"""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dsa_ops import api

# Bytes of one tile. On a CPU small tiles stay in the cache, and read fewer keys that only some of their rows see.
_MASK_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
_LOGIT_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
# Above so many bytes for all rows, masks are made again in the backward instead of kept for it.
_MASKS_KEPT = {"cpu": 32 << 20, "cuda": 128 << 20}


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """out [B, L, H, V] of q [B, L, H, D], k [B, S, H, D], v [B, S, H, V]; causal without bounds (L == S).

    sinks [H] adds exp(sinks[h]) to the denominator. A row without a visible key gives 0. So does, on CPU, a row whose
    logits are NaN: torch's fused causal kernel takes it for one.
    """
    wide, narrow = q.shape[-1], v.shape[-1]
    parts = 0 if sinks is None else _SINK_PARTS
    width = max(wide + parts, narrow)
    if width != wide or width != narrow:
        # fused kernels want equal widths of queries and values, and aligned rows
        width = -(-width // 8) * 8
        q, k, v = (t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in (q, k, v))  # or a copy
    if sinks is not None:
        ones = q.new_ones(parts)
        q = q + F.pad(ones, (wide, width - wide - parts))
    if (starts is None or ends is None) and sinks is None:
        return _sdpa(q, k, v, softmax_scale, is_causal=True).narrow(-1, 0, narrow)
    # The null key: value 0, and what a row attends to beside its visible keys (a sink) or instead of them: of a row
    # without any, some fused kernels make something else than 0.
    null = k.new_zeros(k.shape[0], 1, *k.shape[2:])
    if sinks is not None:
        null = null + _sink_row(sinks, softmax_scale, k.dtype, wide, width)
    zero = v.new_zeros(v.shape[0], 1, *v.shape[2:])
    if starts is None or ends is None:
        # in front, with a row of its own, it is visible to every row of the same causal mask
        out = _sdpa(
            F.pad(q, (0, 0, 0, 0, 1, 0)),
            torch.cat((null, k), 1),
            torch.cat((zero, v), 1),
            softmax_scale,
            is_causal=True,
        )
        return out.narrow(1, 1, q.shape[1]).narrow(-1, 0, narrow)
    k, v = torch.cat((k, null), 1), torch.cat((v, zero), 1)
    keys = k.shape[1] - 1
    mask_bytes = 4 * q.shape[0] * (keys + 1)
    if q.dtype == torch.float64 and q.device.type == "cuda":
        mask_bytes *= 2 * q.shape[2]  # no fused kernel: the logits are materialised
    tiles = _tiles(q.shape[1], mask_bytes, _MASK_BYTES, q.device)
    recompute = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    recompute = recompute and q.shape[1] * mask_bytes > _budget(_MASKS_KEPT, q.device)
    outs = []
    for rows in tiles:
        # one by one: of a generator that closes over `rows`, torch 2.11 takes the length for a constant
        q_tile = _cut(q, 1, rows.start, rows.stop)
        low, high = _cut(starts, 1, rows.start, rows.stop), _cut(ends, 1, rows.start, rows.stop)
        first, last = _key_range(low, high, keys)
        inputs = (q_tile, k, v, low, high, first, last, softmax_scale, sinks is not None)
        if recompute:
            outs.append(checkpoint(_tile, *inputs, use_reentrant=False, preserve_rng_state=False))
        else:
            outs.append(_tile(*inputs))
    return torch.cat(outs, 1).narrow(-1, 0, narrow)


def visible_lse(
    q: Tensor, k: Tensor, *, softmax_scale: float, starts: Tensor | None = None, ends: Tensor | None = None
) -> Tensor:
    """Natural logarithm of sum_s exp(softmax_scale * q . k_s) over exactly the visible keys, [B, L, H], no gradient.

    float32 (float64 for float64 q); -inf for a row without a visible key. Causal without bounds (L == S).
    """
    device = q.device.type
    autocast = not q.is_meta and torch.is_autocast_enabled(device)  # which cannot be asked of meta
    q, k = q.detach(), k.detach()  # not `no_grad`: torch.export.load refuses what that leaves in a program
    with torch.autocast(device, enabled=False) if autocast else nullcontext():
        wide = torch.promote_types(q.dtype, torch.float32)
        keys = k.shape[1]
        k = k.transpose(1, 2).clone(memory_format=torch.contiguous_format).to(wide)
        row_bytes = 3 * wide.itemsize * q.shape[0] * q.shape[2] * keys
        tiles = []
        for rows in _tiles(q.shape[1], row_bytes, _LOGIT_BYTES, q.device):
            if starts is None or ends is None:
                first, last = 0, rows.stop
                ids = torch.arange(rows.start, rows.stop, device=q.device)
                low, high = torch.zeros_like(ids).unsqueeze(0), ids.unsqueeze(0) + 1
            else:
                low, high = _cut(starts, 1, rows.start, rows.stop), _cut(ends, 1, rows.start, rows.stop)
                first, last = _key_range(low, high, keys)
            q_tile = _cut(q, 1, rows.start, rows.stop).transpose(1, 2).to(wide)
            logits = (q_tile * softmax_scale) @ _cut(k, 2, first, last).mT
            hidden = _visible(low, high, first, last).logical_not().unsqueeze(1)
            tiles.append(logits.masked_fill_(hidden, float("-inf")).logsumexp(-1).transpose(1, 2))
        return torch.cat(tiles, 1).clone(memory_format=torch.contiguous_format)


# A sink is a logit of full precision, but travels in key columns of q's dtype: as many terms of ever smaller size.
_SINK_PARTS = 3


def _sink_row(sinks: Tensor, softmax_scale: float, dtype: torch.dtype, wide: int, width: int) -> Tensor:
    """Key row [H, width] whose product with a query that is 1 in the sink columns is sinks / softmax_scale."""
    largest = torch.finfo(dtype).max / 4  # an infinite sink, or one that dtype cannot hold, is as good as that
    rest = (sinks.to(torch.promote_types(sinks.dtype, torch.float32)) / softmax_scale).clamp(-largest, largest)
    terms = []
    for _ in range(_SINK_PARTS):
        # the leading term alone carries the gradient: each sees that of the whole sum
        terms.append(rest.to(dtype))
        rest = (rest - terms[-1].to(rest.dtype)).detach()
    return F.pad(torch.stack(terms, -1), (wide, width - wide - _SINK_PARTS))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale).transpose(1, 2)


def _tile(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor, first: int, last: int, scale: float, sunk: bool
) -> Tensor:
    """One tile of rows over keys first..last and the null key, which is k's and v's last row."""
    keys = k.shape[1] - 1
    if first != 0 or last != keys:
        k, v = (torch.cat((_cut(t, 1, first, last), _cut(t, 1, keys, keys + 1)), 1) for t in (k, v))
    visible = _visible(starts, ends, first, last)
    null = visible.new_ones(*visible.shape[:-1], 1) if sunk else visible.any(-1, keepdim=True).logical_not()
    return _sdpa(q, k, v, scale, torch.cat((visible, null), -1).unsqueeze(1))


def _cut(t: Tensor, dim: int, first: int, last: int) -> Tensor:
    return t.narrow(dim, first, last - first)


def _visible(starts: Tensor, ends: Tensor, first: int, last: int) -> Tensor:
    ids = torch.arange(first, last, device=starts.device, dtype=starts.dtype)
    return (ids >= starts.unsqueeze(-1)) & (ids < ends.unsqueeze(-1))


def _tiles(rows: int, row_bytes: int, budgets: dict[str, int], device: torch.device) -> list[slice]:
    """Slices that cover the rows, each within the budget.

    The number of tiles is what a compiled caller is specialised on, not the number of rows.
    """
    count = rows * row_bytes // _budget(budgets, device) + 1
    size = (rows + count - 1) // count
    return [slice(i * size, min((i + 1) * size, rows)) for i in range(count) if i == 0 or i * size < rows]


def _budget(budgets: dict[str, int], device: torch.device) -> int:
    return budgets.get(device.type, budgets["cuda"])


def _key_range(starts: Tensor, ends: Tensor, keys: int) -> tuple[int, int]:
    """Keys that some row of the tile sees, where reading the bounds costs nothing; else all keys."""
    if starts.device.type != "cpu" or not api._readable(starts):
        return 0, keys
    seen = ends > starts
    if not bool(seen.any()):
        return 0, 0
    return max(int(starts[seen].min()), 0), min(int(ends[seen].max()), keys)
