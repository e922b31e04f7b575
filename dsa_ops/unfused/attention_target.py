"""Unfused dsa::attention_target: attention probabilities on the selected keys, summed over heads."""

from torch import Tensor

from dsa_ops.checks import accumulation_dtype
from dsa_ops.unfused.sparse_mla import attention_tiles, weights_from


def attention_target_unfused(
    q: Tensor, kv: Tensor, lse: Tensor, indices: Tensor, softmax_scale: float, topk_length: Tensor | None
) -> Tensor:
    slots = indices.shape[1]
    target = q.new_empty(indices.shape, dtype=accumulation_dtype(q.dtype))
    if kv.shape[0] == 0:
        return target.zero_()
    for tile, _, _, logits_CHK in attention_tiles(q, kv, indices, topk_length, softmax_scale):
        target_CK = weights_from(logits_CHK, tile.rows_of(lse)).sum(1).masked_fill_(tile.empty_slots, 0)
        tile.store(target, target_CK[:, :slots])
    return target
