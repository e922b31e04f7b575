"""Unfused dsa::sparse_mla: gather the selected rows of a tile, one small product per row. Backward recomputes.

T query rows, S keys, H heads, D query/key width, V value width, K slots, C rows of one tile.
"""

import torch
from torch import Tensor

from dsa_ops.checks import accumulation_dtype
from dsa_ops.unfused._common import SlotTile, bmm_wide, pad_width, slot_bytes, slot_tiles, whole_lanes


def attention_logits(tile: SlotTile, q: Tensor, kv: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [C, H, D], gathered keys [C, K, D] and scaled logits [C, H, K], -inf in empty slots.

    `kv` has whole lanes. The logits of rows without a valid slot are -inf or NaN.
    """
    keys_CKD = tile.gather(kv)
    q_CHD = pad_width(tile.rows_of(q)).to(keys_CKD.dtype)
    logits_CHK = bmm_wide(q_CHD, keys_CKD.transpose(1, 2))
    mask_CK = torch.where(tile.valid, 0.0, -torch.inf).to(logits_CHK.dtype)
    torch.add(mask_CK[:, None], logits_CHK, alpha=softmax_scale, out=logits_CHK)
    return q_CHD, keys_CKD, logits_CHK


def weights_from(logits_CHK: Tensor, norm_CH: Tensor, tile: SlotTile) -> Tensor:
    """exp(logits - norm), overwriting logits; rows without a key have no norm."""
    return logits_CHK.sub_(norm_CH.masked_fill(tile.empty_rows[:, None], 0)[..., None]).exp_()


def _with_sink(lse: Tensor, sink: Tensor | None) -> Tensor:
    return lse if sink is None else torch.logaddexp(lse, sink.to(lse.dtype))


def sparse_mla_unfused(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    softmax_scale: float,
    d_v: int,
    sink: Tensor | None,
    topk_length: Tensor | None,
) -> tuple[Tensor, Tensor]:
    _, heads, width = q.shape
    out = q.new_empty(*q.shape[:2], d_v)
    lse = q.new_empty(q.shape[:2], dtype=accumulation_dtype(q.dtype))
    if kv.shape[0] == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    kv = pad_width(kv)

    def run_tile(tile: SlotTile) -> None:  # a function, so that its temporaries die before the next tile
        _, keys_CKD, logits_CHK = attention_logits(tile, q, kv, softmax_scale)
        largest_CH = logits_CHK.amax(-1)
        p_CHK = torch.softmax(logits_CHK, -1)
        # the largest weight is exp(largest - lse): cheaper than a logsumexp of its own
        lse_CH = torch.where(largest_CH.isinf(), largest_CH, largest_CH - p_CHK.amax(-1).log_())
        lse_CH.masked_fill_(tile.empty_rows[:, None], -torch.inf)
        out_CHV = bmm_wide(p_CHK.to(keys_CKD.dtype), keys_CKD[..., : whole_lanes(d_v)])[..., :d_v]
        if sink is not None:
            out_CHV = out_CHV * torch.exp(lse_CH - _with_sink(lse_CH, sink))[..., None]
        tile.store(out, out_CHV.masked_fill(tile.empty_rows[:, None, None], 0))
        tile.store(lse, lse_CH)

    for tile in slot_tiles(indices, kv.shape[0], topk_length, slot_bytes(width, heads, kv.dtype, backward=False)):
        run_tile(tile)
    return out, lse


def sparse_mla_backward_unfused(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    d_v: int,
    sink: Tensor | None,
    topk_length: Tensor | None,
    need_q: bool,
    need_kv: bool,
    need_sink: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    acc = accumulation_dtype(q.dtype)
    _, heads, width = q.shape
    num_keys, kv_dtype = kv.shape[0], kv.dtype
    need_sink = need_sink and sink is not None
    grad_q = q.new_zeros(q.shape if need_q else 0)
    grad_kv = q.new_zeros((num_keys + 1, width) if need_kv else 0, dtype=acc)  # row S collects rows without keys
    grad_sink = q.new_zeros(heads if need_sink else 0, dtype=acc)
    kv = pad_width(kv)

    def run_tile(tile: SlotTile) -> None:
        q_CHD, keys_CKD, logits_CHK = attention_logits(tile, q, kv, softmax_scale)
        lse_CH = tile.rows_of(lse)
        norm_CH = _with_sink(lse_CH, sink)
        p_lse_CHK = None  # lse leaves the sink out
        if grad_lse is not None and sink is not None:
            p_lse_CHK = weights_from(logits_CHK.clone(), lse_CH, tile)
        p_CHK = weights_from(logits_CHK, norm_CH, tile)
        if grad_out is None:
            grad_logits_CHK = torch.zeros_like(p_CHK)
        else:
            grad_out_CHV = pad_width(tile.rows_of(grad_out)).to(keys_CKD.dtype)
            delta_CH = (grad_out_CHV[..., :d_v].to(acc) * tile.rows_of(out).to(acc)).sum(-1)
            values_CKV = keys_CKD[..., : grad_out_CHV.shape[-1]]
            grad_logits_CHK = bmm_wide(grad_out_CHV, values_CKV.transpose(1, 2))
            grad_logits_CHK.sub_(delta_CH[..., None]).mul_(p_CHK)
            if need_sink and sink is not None:
                share_CH = torch.sigmoid(sink.to(acc) - lse_CH) * delta_CH
                grad_sink.sub_(share_CH.masked_fill_(tile.empty_rows[:, None], 0).sum(0))
        if grad_lse is not None:
            weights_CHK = p_CHK if p_lse_CHK is None else p_lse_CHK
            grad_logits_CHK.addcmul_(weights_CHK, tile.rows_of(grad_lse).to(acc)[..., None])
        # not a product with zero: the incoming gradients of empty rows and slots may hold anything
        grad_logits_CHK.masked_fill_(~tile.valid[:, None], 0)
        # one product for both ways into a key: as key, dS^T q, and as value, P^T dO
        ways = 1 if grad_out is None else 2
        weights_CWK = keys_CKD.new_empty(tile.size, ways * heads, logits_CHK.shape[2])
        weights_CWK[:, :heads] = grad_logits_CHK.mul_(softmax_scale)
        if need_q:
            grad_q_CHD = bmm_wide(weights_CWK[:, :heads], keys_CKD)[..., :width]
            tile.store(grad_q, grad_q_CHD.masked_fill(tile.empty_rows[:, None, None], 0))
        if need_kv:
            sources_CWD = q_CHD
            if grad_out is not None:
                weights_CWK[:, heads:] = p_CHK
                sources_CWD = q_CHD.new_zeros(tile.size, 2 * heads, q_CHD.shape[2])
                sources_CWD[:, :heads] = q_CHD
                sources_CWD[:, heads:, : grad_out_CHV.shape[2]] = grad_out_CHV
            grad_keys_CKD = bmm_wide(weights_CWK.transpose(1, 2), sources_CWD)
            tile.scatter_add(grad_kv, grad_keys_CKD[..., :width])

    if num_keys > 0:
        for tile in slot_tiles(indices, num_keys, topk_length, slot_bytes(width, heads, kv_dtype, backward=True)):
            run_tile(tile)
    grad_kv = grad_kv[:num_keys].to(kv_dtype, copy=True) if need_kv else kv.new_empty(0)
    return grad_q, grad_kv, grad_sink.to(sink.dtype if sink is not None else q.dtype)
