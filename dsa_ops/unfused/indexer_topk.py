"""Unfused dsa::indexer_topk: scores in tiles, then an exact selection in the contract's total order.

T query rows, S keys, K slots; R rows of a tile, N candidate columns.
"""

import torch
from torch import Tensor

from dsa_ops.checks import accumulation_dtype
from dsa_ops.unfused._common import workspace_bytes
from dsa_ops.unfused._tiles import Grid, GridTile, IndexRows, key_tile, row_tiles

INVISIBLE = torch.iinfo(torch.int32).min  # below the rank of -inf
BYTES_PER_CANDIDATE = 40  # scores, ranks, composite keys and the copies topk makes


def indexer_topk_unfused(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int, relu: bool
) -> tuple[Tensor, Tensor]:
    rows, heads, _ = q.shape
    indices = starts.new_full((rows, topk), -1)
    scores = q.new_full((rows, topk), -torch.inf, dtype=accumulation_dtype(q.dtype))
    grid = Grid.for_heads(heads, q.device)
    candidates = workspace_bytes(q.device) // (grid.rows * BYTES_PER_CANDIDATE)
    block = max(1, (candidates - topk) // grid.keys)  # key tiles ranked at once
    for tile in row_tiles(starts, ends, k.shape[0], grid):
        index_rows = IndexRows(q, weights, tile, relu)
        best = None
        for i in range(0, len(tile.key_tiles), block):
            scores_RN, visible_RN = _score_block(index_rows, k, tile, tile.key_tiles[i : i + block], grid)
            best = _merge(best, scores_RN, tile.key_tiles[i], visible_RN, topk)
        if best is not None:
            found = best[0].shape[1]
            tile.store(indices[:, :found], best[0])
            tile.store(scores[:, :found], best[1])
    return indices, scores


def _score_block(index_rows: IndexRows, k: Tensor, tile: GridTile, first_keys: range, grid: Grid):
    """Scores [R, N] of consecutive key tiles, and which of the keys each row may see."""
    columns = len(first_keys) * grid.keys
    scores_RN = index_rows.weights_RI.new_empty(grid.rows, columns)
    for i, first_key in enumerate(first_keys):
        dots = index_rows.dots(key_tile(k, first_key, grid))
        scores_RN[:, i * grid.keys : (i + 1) * grid.keys] = index_rows.scores(dots)
    return scores_RN, tile.visible(first_keys[0], columns)


def _merge(best, scores_RN: Tensor, first_id: int, visible_RN: Tensor, topk: int):
    """The best of the kept candidates and a further block of keys, all of which have higher ids."""
    if best is None:
        columns = best_columns(scores_RN, visible_RN, topk)
        chosen = columns < scores_RN.shape[1]
        columns = columns.clamp(max=scores_RN.shape[1] - 1)
        ids = columns + first_id
    else:
        ids_RN = torch.arange(first_id, first_id + scores_RN.shape[1], device=scores_RN.device, dtype=torch.int32)
        ids_RN = torch.cat([best[0], ids_RN.expand(scores_RN.shape)], 1)
        scores_RN = torch.cat([best[1], scores_RN], 1)
        columns = best_columns(scores_RN, torch.cat([best[0] >= 0, visible_RN], 1), topk)
        chosen = columns < scores_RN.shape[1]
        columns = columns.clamp(max=scores_RN.shape[1] - 1)
        ids = ids_RN.gather(1, columns)
    ids = ids.to(torch.int32).masked_fill_(~chosen, -1)
    return ids, scores_RN.gather(1, columns).masked_fill_(~chosen, -torch.inf)


def best_columns(scores_RN: Tensor, visible_RN: Tensor, topk: int) -> Tensor:
    """Columns of the topk best visible scores [R, min(topk, N)], ascending, then N where there is none.

    NaN ranks highest, -0.0 equals +0.0, a visible -inf ranks last; ties go to the lower column.
    """
    columns = scores_RN.shape[1]
    width = min(topk, columns)
    if scores_RN.dtype == torch.float64:
        order = scores_RN.add(0.0).argsort(dim=1, descending=True, stable=True)
        order = order.gather(1, visible_RN.gather(1, order).byte().argsort(dim=1, descending=True, stable=True))
        best = order[:, :width]
        return best.masked_fill(~visible_RN.gather(1, best), columns).sort(1).values
    # one int64 key per candidate, score first, then column: all different, so any top-k algorithm gives the same set
    bits = scores_RN.add(0.0).view(torch.int32)  # -0.0 + 0.0 is +0.0
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # signed order of the bits = order of the floats
    rank.masked_fill_(scores_RN.isnan(), torch.iinfo(torch.int32).max).masked_fill_(~visible_RN, INVISIBLE)
    reversed_columns = torch.arange(columns - 1, -1, -1, device=scores_RN.device)
    keys = (rank.long() << 32).add_(reversed_columns).topk(width, 1, sorted=False).values
    best = (columns - 1) - (keys & 0xFFFFFFFF)
    return best.masked_fill_(keys >> 32 == INVISIBLE, columns).sort(1).values
