"""Unfused dsa::sparse_mla: gather the selected rows of a chunk, one small product per row. Backward recomputes.

T query rows, S keys, H heads, D query/key width, V value width, K slots, C rows of one chunk.
"""

import torch
from torch import Tensor

from dsa_ops.checks import accumulation_dtype
from dsa_ops.unfused._common import Slots, bmm_wide, operand_dtype, row_chunks


def chunk_bytes(heads: int, width: int, slots: int, itemsize: int, copies: int) -> int:
    """Temporaries of one query row: the gathered keys and `copies` tensors as large as the logits."""
    return slots * (width * itemsize * 2 + heads * 4 * copies)


def chunk_logits(q: Tensor, kv: Tensor, slots: Slots, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Gathered keys [C, K, D] and scaled logits [C, H, K], -inf in empty slots."""
    keys_CKD = slots.gather(kv)
    keys_CKD = keys_CKD.to(operand_dtype(keys_CKD.dtype, keys_CKD.device))
    logits_CHK = bmm_wide(q.to(keys_CKD.dtype), keys_CKD.transpose(1, 2))
    return keys_CKD, logits_CHK.mul_(softmax_scale).masked_fill_(~slots.valid[:, None], -torch.inf)


def weights_from(logits_CHK: Tensor, norm_CH: Tensor) -> Tensor:
    """exp(logits - norm), overwriting logits; 0 where the norm is -inf (a row without a key)."""
    return logits_CHK.sub_(norm_CH.masked_fill(norm_CH == -torch.inf, 0)[..., None]).exp_()


def _with_sink(lse: Tensor, sink: Tensor | None) -> Tensor:
    return lse if sink is None else torch.logaddexp(lse, sink.to(lse.dtype))


def _chunks(q: Tensor, kv: Tensor, indices: Tensor, topk_length: Tensor | None, copies: int):
    _, heads, width = q.shape
    per_row = chunk_bytes(heads, width, indices.shape[1], kv.element_size(), copies)
    for rows in row_chunks(q.shape[0], per_row, q.device):
        length = None if topk_length is None else topk_length[rows]
        yield rows, Slots(indices[rows], kv.shape[0], length)


def sparse_mla_unfused(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    softmax_scale: float,
    d_v: int,
    sink: Tensor | None,
    topk_length: Tensor | None,
) -> tuple[Tensor, Tensor]:
    acc = accumulation_dtype(q.dtype)
    out = q.new_empty(*q.shape[:2], d_v)
    lse = q.new_empty(q.shape[:2], dtype=acc)
    if kv.shape[0] == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    for rows, slots in _chunks(q, kv, indices, topk_length, copies=2):
        keys_CKD, logits_CHK = chunk_logits(q[rows], kv, slots, softmax_scale)
        lse_CH = torch.logsumexp(logits_CHK, -1)
        p_CHK = weights_from(logits_CHK, _with_sink(lse_CH, sink))
        out_CHV = bmm_wide(p_CHK.to(keys_CKD.dtype), keys_CKD[..., :d_v])
        out[rows] = out_CHV.masked_fill_(slots.empty_rows[:, None, None], 0)
        lse[rows] = lse_CH
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
    num_keys, width = kv.shape
    need_sink = need_sink and sink is not None
    grad_q = q.new_zeros(q.shape if need_q else 0)
    grad_kv = q.new_zeros((num_keys + 1, width) if need_kv else 0, dtype=acc)  # row S collects empty slots
    grad_sink = q.new_zeros(q.shape[1] if need_sink else 0, dtype=acc)
    if num_keys > 0:
        for rows, slots in _chunks(q, kv, indices, topk_length, copies=4):
            q_CHD, lse_CH = q[rows], lse[rows]
            keys_CKD, logits_CHK = chunk_logits(q_CHD, kv, slots, softmax_scale)
            operand = keys_CKD.dtype
            norm_CH = _with_sink(lse_CH, sink)
            p_lse_CHK = None  # lse leaves the sink out
            if grad_lse is not None and sink is not None:
                p_lse_CHK = weights_from(logits_CHK.clone(), lse_CH)
            p_CHK = weights_from(logits_CHK, norm_CH)
            grad_logits_CHK = torch.zeros_like(p_CHK) if grad_out is None else None
            grad_out_CHV = None
            if grad_out is not None:
                grad_out_CHV = grad_out[rows].to(operand)
                delta_CH = (grad_out_CHV.to(acc) * out[rows].to(acc)).sum(-1)
                grad_logits_CHK = bmm_wide(grad_out_CHV, keys_CKD[..., :d_v].transpose(1, 2))
                grad_logits_CHK.sub_(delta_CH[..., None]).mul_(p_CHK)
                if need_sink:
                    share_CH = torch.exp(sink.to(acc) - norm_CH) * delta_CH
                    grad_sink -= share_CH.masked_fill_(slots.empty_rows[:, None], 0).sum(0)
            if grad_lse is not None:
                grad_logits_CHK.addcmul_(p_CHK if p_lse_CHK is None else p_lse_CHK, grad_lse[rows].to(acc)[..., None])
            # not a product with zero: incoming gradients of empty rows and slots may hold anything
            grad_logits_CHK.masked_fill_(~slots.valid[:, None], 0).mul_(softmax_scale)
            grad_logits_CHK = grad_logits_CHK.to(operand)
            if need_q:
                grad_q_CHD = bmm_wide(grad_logits_CHK, keys_CKD)
                grad_q[rows] = grad_q_CHD.masked_fill_(slots.empty_rows[:, None, None], 0)
            if need_kv:
                grad_keys_CKD = bmm_wide(grad_logits_CHK.transpose(1, 2), q_CHD.to(operand))
                if grad_out_CHV is not None:
                    grad_keys_CKD[..., :d_v] += bmm_wide(p_CHK.to(operand).transpose(1, 2), grad_out_CHV)
                slots.scatter_add(grad_kv, grad_keys_CKD)
    if need_kv:
        grad_kv = grad_kv[:num_keys].to(kv.dtype, copy=True)
    return grad_q, grad_kv if need_kv else kv.new_empty(0), grad_sink.to(sink.dtype if need_sink else q.dtype)
