"""Unfused dsa::indexer_scores and its backward: gather the keys of a tile's slots, one small product per row.

T query rows, S keys, I indexer heads, E indexer width, K slots, C rows of one tile.
"""

import torch
from torch import Tensor

from dsa_ops.checks import accumulation_dtype
from dsa_ops.unfused._common import (
    SlotTile,
    bmm_wide,
    pad_width,
    relu_gradient,
    slot_bytes,
    slot_tiles,
    weighted_sum,
)


def _products(tile: SlotTile, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [C, I, E], gathered keys [C, K, E] and their products [C, I, K]; `k` has whole lanes."""
    keys_CKE = tile.gather(k)
    q_CIE = pad_width(tile.rows_of(q)).to(keys_CKE.dtype)
    return q_CIE, keys_CKE, bmm_wide(q_CIE, keys_CKE.transpose(1, 2))


def indexer_scores_unfused(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, relu: bool) -> Tensor:
    acc = accumulation_dtype(q.dtype)
    _, heads, width = q.shape
    scores = q.new_empty(indices.shape, dtype=acc)
    if k.shape[0] == 0:
        return scores.fill_(-torch.inf)
    k = pad_width(k)

    def run_tile(tile: SlotTile) -> None:  # a function, so that its temporaries die before the next tile
        _, _, dots_CIK = _products(tile, q, k)
        act_CIK = dots_CIK.relu_() if relu else dots_CIK
        scores_CK = weighted_sum(tile.rows_of(weights).to(acc), act_CIK)
        tile.store(scores, scores_CK.masked_fill_(~tile.valid, -torch.inf)[:, : scores.shape[1]])

    for tile in slot_tiles(indices, k.shape[0], None, slot_bytes(width, heads, k.dtype, backward=False)):
        run_tile(tile)
    return scores


def indexer_scores_backward_unfused(
    grad_scores: Tensor,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor,
    relu: bool,
    need_q: bool,
    need_k: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    acc = accumulation_dtype(q.dtype)
    _, heads, width = q.shape
    num_keys, k_dtype = k.shape[0], k.dtype
    grad_q = q.new_zeros(q.shape if need_q else 0)
    grad_k = q.new_zeros((num_keys + 1, width) if need_k else 0, dtype=acc)  # row S collects rows without keys
    grad_weights = weights.new_zeros(weights.shape if need_weights else 0)
    k = pad_width(k)

    def run_tile(tile: SlotTile) -> None:
        q_CIE, keys_CKE, dots_CIK = _products(tile, q, k)
        grad_CK = pad_width(tile.rows_of(grad_scores)).to(acc).masked_fill(~tile.valid, 0)
        empty_rows = tile.empty_rows[:, None]
        if need_weights:
            act_CIK = dots_CIK.relu() if relu else dots_CIK
            grad_weights_CI = torch.bmm(act_CIK, grad_CK[..., None])[..., 0]
            tile.store(grad_weights, grad_weights_CI.masked_fill_(empty_rows, 0))
        if need_q or need_k:
            grad_dots_CIK = tile.rows_of(weights).to(acc)[..., None] * grad_CK[:, None]
            if relu:
                grad_dots_CIK = relu_gradient(grad_dots_CIK, dots_CIK)
            # not a product with zero: query and weight of an empty row may hold anything
            grad_dots_CIK = grad_dots_CIK.masked_fill_(~tile.valid[:, None], 0).to(keys_CKE.dtype)
        if need_q:
            grad_q_CIE = bmm_wide(grad_dots_CIK, keys_CKE)[..., :width]
            tile.store(grad_q, grad_q_CIE.masked_fill(empty_rows[..., None], 0))
        if need_k:
            tile.scatter_add(grad_k, bmm_wide(grad_dots_CIK.transpose(1, 2), q_CIE)[..., :width])

    if num_keys > 0:
        for tile in slot_tiles(indices, num_keys, None, slot_bytes(width, heads, k_dtype, backward=True)):
            run_tile(tile)
    grad_k = grad_k[:num_keys].to(k_dtype, copy=True) if need_k else k.new_empty(0)
    return grad_q, grad_k, grad_weights
