"""Gradient of the KL to the indexer's scores: grad_scores of dsa::indexer_kl_backward, in Triton.

Work       one program = one row, in the same blocks as the forward in indexer_kl.py: in registers up to 8192 slots,
           else read twice.
Value      (p - t) * grad_kl, formed from p and t themselves.
Empty      slots with a negative id, and rows whose target sums to less than 1e-10, get 0 whatever stands in them and in
           grad_kl.
NaN        the valid slots of a row as in the forward.
Order      fixed by the number of slots alone.
Budget     as the forward.
Bound      reading 12 bytes and writing 4 bytes per slot.
Limits     float32 target and scores, grad_kl of any floating dtype; any T and K.
Compiles   per variant: the five blocks, and the loop. T, K and the stride of grad_kl are run-time arguments.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from csrc_tilelang import indexer_kl
from csrc_tilelang._arguments import dense
from csrc_tilelang._triton import Variants
from csrc_tilelang.indexer_kl import compile_all, not_infinite, read, share_of, sums, variant

VARIANTS: list = []  # none for tools/lower_check: Triton compiles these itself


def refuse(grad_kl: Tensor, target: Tensor, scores: Tensor, indices: Tensor) -> str | None:
    return indexer_kl.refuse(target, scores, indices)


def launch(grad_kl: Tensor, target: Tensor, scores: Tensor, indices: Tensor) -> Tensor:
    rows, slots = target.shape
    grad_scores = torch.empty(rows, slots, dtype=torch.float32, device=target.device)
    if rows:
        if grad_kl.dtype != torch.float32:
            grad_kl = grad_kl.float()
        block, lanes, whole, warps = variant(slots)
        run = backward(lanes, block, whole, warps=warps)[rows, 1, 1]
        stride = grad_kl.stride(0)  # often 0: a sum gives every row the same
        inputs = dense(target), dense(scores), dense(indices)
        run(grad_kl, stride, *inputs, grad_scores, slots // lanes, lanes, block, whole)
    return grad_scores


def compile_for(*, heads, index_heads, head_dim, v_dim, index_dim, dtype, device) -> str | None:
    return compile_all(backward, dtype, device)


@triton.jit(do_not_specialize=["stride", "width"], do_not_specialize_on_alignment=["grad_kl"])
def _backward(
    grad_kl,
    stride,
    target,
    scores,
    indices,
    grad_scores,
    width,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    K = width * LANES
    grad = tl.load(grad_kl + row * stride)
    if WHOLE:
        t, score, valid, at, inside = read(target, scores, indices, row, K, 0, BLOCK)
        total = not_infinite(tl.sum(t, 0))
        weight = tl.exp(score - tl.max(score, 0))
        value = (weight * (1.0 / tl.sum(weight, 0)) - share_of(t, total, 1.0 / total)) * grad
        tl.store(grad_scores + at, tl.where(valid, tl.where(total < 1e-10, 0.0, value), 0.0), mask=inside)
    else:
        total, top, mass = sums(target, scores, indices, row, K, BLOCK)
        for first in range(0, K, BLOCK):
            t, score, valid, at, inside = read(target, scores, indices, row, K, first, BLOCK)
            value = (tl.exp(score - top) * (1.0 / mass) - share_of(t, total, 1.0 / total)) * grad
            tl.store(grad_scores + at, tl.where(valid, tl.where(total < 1e-10, 0.0, value), 0.0), mask=inside)


backward = Variants(_backward, torch.float32, 1, torch.float32, torch.float32, torch.int32, torch.float32, 1)
