"""Unfused dsa::indexer_scores and its backward: gather the keys of a chunk's slots, one small product per row.

T query rows, S keys, I indexer heads, E indexer width, K slots, C rows of one chunk.
"""

import torch
from torch import Tensor

from dsa_ops.checks import accumulation_dtype
from dsa_ops.unfused._common import Slots, bmm_wide, operand_dtype, row_chunks


def _chunks(q: Tensor, k: Tensor, indices: Tensor):
    _, heads, width = q.shape
    per_row = indices.shape[1] * (2 * width * k.element_size() + 4 * width + 3 * heads * 4)
    for rows in row_chunks(q.shape[0], per_row, q.device):
        slots = Slots(indices[rows], k.shape[0], None)
        keys_CKE = slots.gather(k)
        keys_CKE = keys_CKE.to(operand_dtype(k.dtype, k.device))
        q_CIE = q[rows].to(keys_CKE.dtype)
        yield rows, slots, q_CIE, keys_CKE, bmm_wide(q_CIE, keys_CKE.transpose(1, 2))


def indexer_scores_unfused(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, relu: bool) -> Tensor:
    acc = accumulation_dtype(q.dtype)
    scores = q.new_empty(indices.shape, dtype=acc)
    if k.shape[0] == 0:
        return scores.fill_(-torch.inf)
    for rows, slots, _, _, dots_CIK in _chunks(q, k, indices):
        act_CIK = dots_CIK.relu_() if relu else dots_CIK
        scores_CK = torch.bmm(weights[rows, None].to(acc), act_CIK)[:, 0]
        scores[rows] = scores_CK.masked_fill_(~slots.valid, -torch.inf)
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
    num_keys, width = k.shape
    grad_q = q.new_zeros(q.shape if need_q else 0)
    grad_k = q.new_zeros((num_keys + 1, width) if need_k else 0, dtype=acc)  # row S collects empty slots
    grad_weights = weights.new_zeros(weights.shape if need_weights else 0)
    if num_keys > 0:
        for rows, slots, q_CIE, keys_CKE, dots_CIK in _chunks(q, k, indices):
            grad_CK = grad_scores[rows].to(acc).masked_fill(~slots.valid, 0)
            empty = slots.empty_rows[:, None]
            if need_weights:
                act_CIK = dots_CIK.relu() if relu else dots_CIK
                grad_weights[rows] = torch.bmm(act_CIK, grad_CK[..., None])[..., 0].masked_fill_(empty, 0)
            if need_q or need_k:
                grad_dots_CIK = weights[rows].to(acc)[..., None] * grad_CK[:, None]
                if relu:
                    grad_dots_CIK.masked_fill_(dots_CIK <= 0, 0)  # gradient 0 at 0; a NaN stays
                grad_dots_CIK.masked_fill_(~slots.valid[:, None], 0)  # the weight may be NaN in an empty row
                grad_dots_CIK = grad_dots_CIK.to(q_CIE.dtype)
            if need_q:
                grad_q[rows] = bmm_wide(grad_dots_CIK, keys_CKE).masked_fill_(empty[..., None], 0)
            if need_k:
                slots.scatter_add(grad_k, bmm_wide(grad_dots_CIK.transpose(1, 2), q_CIE))
    if need_k:
        grad_k = grad_k[:num_keys].to(k.dtype, copy=True)
    return grad_q, grad_k if need_k else k.new_empty(0), grad_weights
