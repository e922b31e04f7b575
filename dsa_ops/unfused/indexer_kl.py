"""Unfused dsa::indexer_kl and its backward: KL of the indexer's softmax from the attention target, row by row."""

import torch
from torch import Tensor

from dsa_ops.checks import accumulation_dtype
from dsa_ops.unfused._common import RowTile, pad_width, tile_rows

EMPTY_TARGET = 1e-10  # a row whose target sums to less counts as empty


def _tiles(target: Tensor, scores: Tensor, indices: Tensor):
    """The normalised target, log softmax of the scores (0 and -inf in empty slots), empty slots and rows, per tile."""
    acc = accumulation_dtype(target.dtype)
    rows, slots = target.shape
    size = tile_rows(slots * acc.itemsize * 6, target.device)
    for start in range(0, rows, size):
        tile = RowTile(start, rows, size)
        empty_CK = pad_width(tile.rows_of(indices, -1), -1) < 0
        target_CK = pad_width(tile.rows_of(target)).to(acc).masked_fill(empty_CK, 0)
        total_C1 = target_CK.sum(-1, keepdim=True)
        total_C1.masked_fill_(total_C1 == torch.inf, torch.nan)  # or every share would be 0 of a sum that overflowed
        empty_C1 = (total_C1 < EMPTY_TARGET) | empty_CK.all(-1, keepdim=True)
        logits_CK = pad_width(tile.rows_of(scores)).to(acc).masked_fill(empty_CK, -torch.inf).masked_fill_(empty_C1, 0)
        yield tile, target_CK.div_(total_C1), torch.log_softmax(logits_CK, -1), empty_CK, empty_C1


def indexer_kl_unfused(target: Tensor, scores: Tensor, indices: Tensor) -> Tensor:
    kl = target.new_empty(target.shape[0], dtype=accumulation_dtype(target.dtype))
    for tile, t_CK, log_p_CK, _, empty_C1 in _tiles(target, scores, indices):
        terms_CK = t_CK.log().sub_(log_p_CK).mul_(t_CK).masked_fill_(t_CK == 0, 0)  # 0 log 0 = 0
        tile.store(kl, terms_CK.sum(-1).masked_fill_(empty_C1[:, 0], 0))
    return kl


def indexer_kl_backward_unfused(grad_kl: Tensor, target: Tensor, scores: Tensor, indices: Tensor) -> Tensor:
    grad_scores = scores.new_empty(scores.shape)
    for tile, t_CK, log_p_CK, empty_CK, empty_C1 in _tiles(target, scores, indices):
        grad_CK = log_p_CK.exp_().sub_(t_CK).mul_(tile.rows_of(grad_kl)[:, None].to(t_CK.dtype))
        tile.store(grad_scores, grad_CK.masked_fill_(empty_CK | empty_C1, 0)[:, : scores.shape[1]])
    return grad_scores
