"""Unfused dsa::attention_target: attention probabilities on the selected keys, summed over heads."""

from torch import Tensor

from dsa_ops.checks import accumulation_dtype
from dsa_ops.unfused._common import SlotTile, pad_width, slot_bytes, slot_tiles
from dsa_ops.unfused.sparse_mla import attention_logits, weights_from


def attention_target_unfused(
    q: Tensor, kv: Tensor, lse: Tensor, indices: Tensor, softmax_scale: float, topk_length: Tensor | None
) -> Tensor:
    _, heads, width = q.shape
    target = q.new_empty(indices.shape, dtype=accumulation_dtype(q.dtype))
    if kv.shape[0] == 0:
        return target.zero_()
    kv = pad_width(kv)

    def run_tile(tile: SlotTile) -> None:
        _, _, logits_CHK = attention_logits(tile, q, kv, softmax_scale)
        target_CK = weights_from(logits_CHK, tile.rows_of(lse), tile).sum(1).masked_fill_(~tile.valid, 0)
        tile.store(target, target_CK[:, : target.shape[1]])

    for tile in slot_tiles(indices, kv.shape[0], topk_length, slot_bytes(width, heads, kv.dtype, backward=False)):
        run_tile(tile)
    return target
