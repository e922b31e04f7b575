"""Unfused dsa::attention_target: attention probabilities on the selected keys, summed over heads."""

import torch
from torch import Tensor

from dsa_ops.checks import accumulation_dtype
from dsa_ops.unfused._common import Slots, row_chunks
from dsa_ops.unfused.sparse_mla import chunk_bytes, chunk_logits, weights_from


def attention_target_unfused(
    q: Tensor, kv: Tensor, lse: Tensor, indices: Tensor, softmax_scale: float, topk_length: Tensor | None
) -> Tensor:
    target = q.new_empty(indices.shape, dtype=accumulation_dtype(q.dtype))
    if kv.shape[0] == 0:
        return target.zero_()
    _, heads, width = q.shape
    per_row = chunk_bytes(heads, width, indices.shape[1], kv.element_size(), copies=2)
    for rows in row_chunks(q.shape[0], per_row, q.device):
        slots = Slots(indices[rows], kv.shape[0], None if topk_length is None else topk_length[rows])
        _, logits_CHK = chunk_logits(q[rows], kv, slots, softmax_scale)
        target[rows] = weights_from(logits_CHK, lse[rows]).sum(1).masked_fill_(~slots.valid, 0)
    return target
