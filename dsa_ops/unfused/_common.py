"""Shared by the unfused implementations: memory budget, wide products, tiles of query rows with their gathered slots.

Results that the contract calls reproducible have the same bits whatever the memory budget and whatever rows a row is
computed with. Libraries pick their code by shape and alignment, so products and sums run on tiles whose shape follows
from the widths alone, padded at the edges, and of widths that are a multiple of LANES.

T query rows, S keys, K slots, C rows of one tile.
"""

import math
import os
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

MIB = 1 << 20
LANES = 16
TILES_PREPARED_AT_ONCE = 16


def workspace_bytes(device: torch.device) -> int:
    """Extra memory one call may use: DSA_OPS_WORKSPACE_MB (MiB), default 256 on CPU and 1024 elsewhere.

    The least is one tile, and what one query row needs: see `tile_rows`.
    """
    text = os.environ.get("DSA_OPS_WORKSPACE_MB")
    if not text:
        return (256 if device.type == "cpu" else 1024) * MIB
    try:
        megabytes = float(text)
    except ValueError:
        megabytes = math.nan
    if not 0 < megabytes < math.inf:
        raise ValueError(f"DSA_OPS_WORKSPACE_MB must be a positive number of MiB, got {text!r}")
    return int(megabytes * MIB)


def tile_rows(bytes_per_row: int, device: torch.device) -> int:
    """Rows of one tile: on CPU it stays in cache (4 MiB), elsewhere it is large enough to hide launches (768 MiB)."""
    workspace_bytes(device)  # refuses a bad setting; the tile itself is far below the default budget
    target, most = (4 * MIB, 256) if device.type == "cpu" else (768 * MIB, 1024)
    return max(1, min(most, target // bytes_per_row))


def pad_rows(x: Tensor, rows: int, value: float = 0) -> Tensor:
    """x [n, ...] -> [rows, ...], filled up at the end."""
    if x.shape[0] == rows:
        return x
    padded = x.new_full((rows, *x.shape[1:]), value)
    padded[: x.shape[0]] = x
    return padded


def pad_width(x: Tensor, value: float = 0) -> Tensor:
    """Fill the last dimension up to a multiple of LANES."""
    missing = whole_lanes(x.shape[-1]) - x.shape[-1]
    return F.pad(x, (0, missing), value=value) if missing else x


def whole_lanes(width: int) -> int:
    """width rounded up to a multiple of LANES."""
    return width + -width % LANES


def operand_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which products are fed: half precision only where the device multiplies it natively."""
    if dtype in (torch.float32, torch.float64) or device.type == "cuda":
        return dtype
    return torch.float32


def bmm_wide(a: Tensor, b: Tensor) -> Tensor:
    """Batched product of operands of one dtype, accumulated and returned in float32 (float64 for float64)."""
    a, b = _blas_strides(a), _blas_strides(b)
    if a.dtype in (torch.float32, torch.float64):
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32)  # on CUDA alone: see operand_dtype


def mm_wide(a: Tensor, b: Tensor) -> Tensor:
    """The same for matrices."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.mm(a, b)
    return torch.mm(a, b, out_dtype=torch.float32)


def _blas_strides(x: Tensor) -> Tensor:
    """x, or a copy where no inner dimension is dense: torch would then loop over the batch."""
    return x if 1 in x.stride()[1:] else x.contiguous()


def weighted_sum(weights_CI: Tensor, values_CIK: Tensor) -> Tensor:
    """sum_i weights[c, i] * values[c, i, k] -> [C, K]."""
    if values_CIK.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32":
        # a setting for the caller's float32 products; half-precision callers are promised weights in full float32
        total_CK = weights_CI[:, :1] * values_CIK[:, 0]
        for i in range(1, weights_CI.shape[1]):
            total_CK.addcmul_(weights_CI[:, i : i + 1], values_CIK[:, i])
        return total_CK
    aligned = pad_width(weights_CI)[:, None, : weights_CI.shape[1]]  # every row begins at a whole lane
    return torch.bmm(aligned, values_CIK)[:, 0]


def relu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad where x > 0 or x is NaN, else 0, in one pass."""
    return torch.ops.aten.threshold_backward(grad, x, 0)


class RowTile:
    """Rows [start, stop) of the pack, padded to `size`."""

    def __init__(self, start: int, rows: int, size: int):
        self.start, self.stop, self.size = start, min(rows, start + size), size

    def rows_of(self, x: Tensor, padding: float = 0) -> Tensor:
        """This tile's rows of x [T, ...], contiguous: strides, too, decide the order in which libraries sum."""
        return pad_rows(x[self.start : self.stop], self.size, padding).contiguous()

    def store(self, into: Tensor, values: Tensor) -> None:
        """Write this tile's rows, without the padding, into a result [T, ...]."""
        into[self.start : self.stop] = values[: self.stop - self.start]


class SlotTile(RowTile):
    """Rows of the pack and which key each of their K slots stands for.

    Empty slots (id < 0, id >= S, at or past topk_length) must have no effect, not even a NaN in the key they would
    read. So they stand for a key that their own row sees anyway, their logits are masked, and what they scatter is
    zero. Rows without any valid slot read row 0, their results are replaced, and they scatter to a spare row S.
    """

    def __init__(self, start: int, rows: int, size: int, ids: Tensor, valid: Tensor, empty_rows: Tensor, num_keys: int):
        super().__init__(start, rows, size)
        self.valid, self.empty_rows = valid, empty_rows  # [C, K], [C]
        self._ids, self._num_keys = ids, num_keys

    def gather(self, keys: Tensor) -> Tensor:
        """[C, K, D]: the key of every slot, in the dtype that products are fed with."""
        rows = keys.index_select(0, self._ids.flatten()).view(*self._ids.shape, keys.shape[1])
        return rows.to(operand_dtype(rows.dtype, rows.device))

    def scatter_add(self, into: Tensor, values: Tensor) -> None:
        """into[id] += values, which are 0 in empty slots, in slot order on CPU; `into` has a spare row at S."""
        ids = self._ids.masked_fill(self.empty_rows[:, None], self._num_keys)
        into.index_add_(0, ids.flatten(), values.flatten(0, 1))


def slot_tiles(indices: Tensor, num_keys: int, topk_length: Tensor | None, bytes_per_slot: int) -> Iterator[SlotTile]:
    """The tiles in order. Slots are padded to a multiple of LANES."""
    rows = indices.shape[0]
    size = tile_rows(bytes_per_slot * whole_lanes(indices.shape[1]), indices.device)
    for first in range(0, rows, size * TILES_PREPARED_AT_ONCE):
        tiles = min(TILES_PREPARED_AT_ONCE, -(-(rows - first) // size))
        group = RowTile(first, rows, tiles * size)
        ids = pad_width(group.rows_of(indices, -1), -1)
        valid = ids == ids.clamp(0, num_keys - 1)
        if topk_length is not None:
            valid &= torch.arange(ids.shape[1], device=ids.device) < group.rows_of(topk_length)[:, None]
        seen = torch.where(valid, ids, -1).amax(-1, keepdim=True)
        empty_rows = seen[:, 0] < 0
        ids = torch.where(valid, ids, seen.clamp_(min=0))
        for i in range(tiles):
            at = slice(i * size, (i + 1) * size)
            yield SlotTile(first + i * size, rows, size, ids[at], valid[at], empty_rows[at], num_keys)


def slot_bytes(width: int, heads: int, dtype: torch.dtype, backward: bool) -> int:
    """Temporaries of one slot: gathered key, products per head, in the backward also their gradients."""
    narrow, wide = dtype.itemsize, max(4, dtype.itemsize)
    if backward:
        return (narrow + wide) * width + (4 * wide + 2 * narrow) * heads
    return narrow * width + (2 * wide + narrow) * heads
