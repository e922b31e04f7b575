"""Unfused dsa::indexer_kl and its backward: KL of the indexer's softmax from the attention target, row by row."""

import torch
from torch import Tensor

from dsa_ops.checks import accumulation_dtype
from dsa_ops.unfused._common import row_chunks

EMPTY_TARGET = 1e-10  # a row whose target sums to less counts as empty


def _chunks(target: Tensor, scores: Tensor, indices: Tensor):
    """Rows, the normalised target, log softmax of the scores (0 and -inf in empty slots), and which rows are empty."""
    acc = accumulation_dtype(target.dtype)
    for rows in row_chunks(target.shape[0], target.shape[1] * 8 * 8, target.device):
        valid = indices[rows] >= 0
        target_CK = target[rows].to(acc).masked_fill(~valid, 0)
        total_C = target_CK.sum(-1)
        empty_C = (total_C < EMPTY_TARGET) | ~valid.any(-1)
        logits_CK = scores[rows].to(acc).masked_fill(~valid, -torch.inf).masked_fill_(empty_C[:, None], 0)
        log_p_CK = torch.log_softmax(logits_CK, -1)
        yield rows, target_CK.div_(total_C[:, None]), log_p_CK, empty_C


def indexer_kl_unfused(target: Tensor, scores: Tensor, indices: Tensor) -> Tensor:
    kl = target.new_empty(target.shape[0], dtype=accumulation_dtype(target.dtype))
    for rows, t_CK, log_p_CK, empty_C in _chunks(target, scores, indices):
        terms_CK = (t_CK * (t_CK.log() - log_p_CK)).masked_fill_(t_CK == 0, 0)  # 0 log 0 = 0
        kl[rows] = terms_CK.sum(-1).masked_fill_(empty_C, 0)
    return kl


def indexer_kl_backward_unfused(grad_kl: Tensor, target: Tensor, scores: Tensor, indices: Tensor) -> Tensor:
    grad_scores = scores.new_empty(scores.shape)
    for rows, t_CK, log_p_CK, empty_C in _chunks(target, scores, indices):
        grad_CK = log_p_CK.exp_().sub_(t_CK).mul_(grad_kl[rows, None].to(t_CK.dtype))
        grad_scores[rows] = grad_CK.masked_fill_(empty_C[:, None] | (indices[rows] < 0), 0)
    return grad_scores
