"""A fixed grid of tiles over (query rows, keys) for the ops that look at every visible key.

Products run on tiles of one shape, padded at the edges, so that a score has the same bits whatever the memory budget
and whatever rows it is computed with. Tiles that no row may see are skipped on CPU; on CUDA reading the bounds would
sync.

R rows of a tile, N keys of a tile, I indexer heads, E indexer width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_ops.checks import accumulation_dtype
from dsa_ops.unfused._common import LANES, RowTile, mm_wide, operand_dtype, pad_rows, pad_width, weighted_sum


@dataclass(frozen=True)
class Grid:
    """Tile sizes for a number of heads: a tile's products are about [512, 256] on CPU, [8192, 4096] on CUDA."""

    rows: int
    keys: int

    @staticmethod
    def for_heads(heads: int, device: torch.device) -> "Grid":
        if device.type == "cpu":
            return Grid(rows=max(LANES, min(128, 512 // heads // LANES * LANES)), keys=256)
        return Grid(rows=max(LANES, min(512, 8192 // heads // LANES * LANES)), keys=4096)


class GridTile(RowTile):
    """Rows of the pack with their clamped bounds; rows of the padding see nothing."""

    def __init__(self, start: int, rows: int, starts: Tensor, ends: Tensor, key_tiles: range):
        super().__init__(start, rows, starts.shape[0])
        self.starts, self.ends = starts, ends  # [R, 1]
        self.key_tiles = key_tiles  # first keys of the tiles that some row sees

    def visible(self, first_key: int, num: int) -> Tensor:
        """[R, num]: which of the keys from first_key on each row may see."""
        keys = torch.arange(first_key, first_key + num, device=self.starts.device, dtype=torch.int32)
        return (keys >= self.starts) & (keys < self.ends)


def row_tiles(starts: Tensor, ends: Tensor, num_keys: int, grid: Grid):
    """The row tiles in order; a tile whose rows see nothing has no key tiles."""
    rows = starts.shape[0]
    tiles = -(-rows // grid.rows)
    starts = pad_rows(starts.clamp(0, num_keys), tiles * grid.rows).view(tiles, grid.rows, 1)
    ends = pad_rows(ends.clamp(0, num_keys), tiles * grid.rows).view(tiles, grid.rows, 1)
    if starts.device.type == "cpu":
        empty = ends <= starts
        first = starts.masked_fill(empty, num_keys).amin((1, 2)) if tiles else starts.view(0)
        last = ends.masked_fill(empty, 0).amax((1, 2)) if tiles else ends.view(0)
        spans = list(zip(first.tolist(), last.tolist(), strict=True))
    else:
        spans = [(0, num_keys)] * tiles
    for i, (lo, hi) in enumerate(spans):
        key_tiles = range(lo // grid.keys * grid.keys, hi, grid.keys)
        yield GridTile(i * grid.rows, rows, starts[i], ends[i], key_tiles)


def key_tile(k: Tensor, first_key: int, grid: Grid) -> Tensor:
    """Keys [N, ...] from first_key on, zeros past the last and past their width."""
    return pad_width(pad_rows(k[first_key : first_key + grid.keys], grid.keys))


class IndexRows:
    """The index queries of one row tile, ready to score key tiles."""

    def __init__(self, q: Tensor, weights: Tensor, tile: GridTile, relu: bool):
        self.operand = operand_dtype(q.dtype, q.device)
        self.q_RIE = pad_width(tile.rows_of(q)).to(self.operand)
        self.weights_RI = tile.rows_of(weights).to(accumulation_dtype(q.dtype))
        self.relu = relu

    def dots(self, keys_NE: Tensor) -> Tensor:
        """[R, I, N]: every product of an index query head with a key."""
        rows, heads, width = self.q_RIE.shape
        dots = mm_wide(self.q_RIE.reshape(rows * heads, width), keys_NE.to(self.operand).t())
        return dots.view(rows, heads, keys_NE.shape[0])

    def scores(self, dots_RIN: Tensor, inplace: bool = True) -> Tensor:
        """[R, N]: the heads' activations, weighted and summed."""
        if self.relu:
            dots_RIN = dots_RIN.relu_() if inplace else dots_RIN.relu()
        return weighted_sum(self.weights_RI, dots_RIN)
