"""KL of the indexer's softmax from the attention target: kl of dsa::indexer_kl, in Triton.

Work       one program = one row. Up to 8192 slots, a multiple of 4, a row is read once and stays in registers, in
           blocks of 512, 1024, 2048, 4096 or 8192 slots (16 slots per lane, 8 in the smallest) with 16-byte loads. Any
           other row is read twice in blocks of 1024: once for its maximum and sums, once for its terms.
Sum        kl = sum t (log t - log p), added up as sum (t d - t + p) with d = log t - log p: the same, since t and p
           both add up to one. No term of it is negative, and an error of d enters multiplied by t - p, so a small kl
           keeps its digits. For |d| < 1, where t d - t + p cancels, a term is t (d^2/2 - d^3/6 + ...).
Empty      a negative id: what stands there in target and scores is read along and thrown away (t = 0, score = -inf). A
           row whose target sums to less than 1e-10, such as one without a valid slot, gives 0.
NaN        a row with a NaN or +inf score, or whose valid scores are all -inf, or whose target's sum is NaN or infinite.
Order      fixed by the number of slots alone.
Budget     no memory but the registers, and a few words of shared memory for sums between warps.
Bound      reading 12 bytes per slot.
Limits     float32 target and scores; any T and K.
Compiles   per variant: the five blocks, and the loop. T, K are run-time arguments.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from csrc_tilelang._arguments import dense
from csrc_tilelang._triton import Variants

VARIANTS: list = []  # none for tools/lower_check: Triton compiles these itself

# (slots of a block, slots of a load, whether the block holds the whole row, warps)
WHOLE_ROWS = ((512, 4, True, 2), (1024, 4, True, 2), (2048, 4, True, 4), (4096, 4, True, 8), (8192, 4, True, 16))
LOOP = (1024, 1, False, 4)


def refuse(target: Tensor, scores: Tensor, indices: Tensor) -> str | None:
    if target.dtype != torch.float32:
        return f"target is {str(target.dtype).removeprefix('torch.')}, the kernel takes float32"
    return None


def variant(slots: int) -> tuple[int, int, bool, int]:
    if slots % 4 == 0:
        for row in WHOLE_ROWS:
            if slots <= row[0]:
                return row
    return LOOP


def launch(target: Tensor, scores: Tensor, indices: Tensor) -> Tensor:
    rows, slots = target.shape
    kl = torch.empty(rows, dtype=torch.float32, device=target.device)
    if rows:
        block, lanes, whole, warps = variant(slots)
        run = forward(lanes, block, whole, warps=warps)[rows, 1, 1]
        run(dense(target), dense(scores), dense(indices), kl, slots // lanes, lanes, block, whole)
    return kl


def compile_for(*, heads, index_heads, head_dim, v_dim, index_dim, dtype, device) -> str | None:
    return compile_all(forward, dtype, device)


def compile_all(kernel: Variants, dtype: torch.dtype, device: torch.device) -> str | None:
    if dtype == torch.float64:
        return "target is float64, the kernel takes float32"
    with torch.cuda.device(device):
        for block, lanes, whole, warps in (*WHOLE_ROWS, LOOP):
            kernel(lanes, block, whole, warps=warps)
    return None


@triton.jit
def read(target, scores, indices, row, K, first, BLOCK: tl.constexpr):
    """Target and score, 0 and -inf in empty slots, which slots are valid, and where they stand."""
    slots = first + tl.arange(0, BLOCK)
    inside = slots < K
    at = row * K + slots
    valid = tl.load(indices + at, mask=inside, other=-1) >= 0
    t = tl.load(target + at, mask=inside, other=0.0)
    score = tl.load(scores + at, mask=inside, other=0.0)
    return tl.where(valid, t, 0.0), tl.where(valid, score, float("-inf")), valid, at, inside


@triton.jit
def not_infinite(total):
    """An infinite sum as NaN, or every share would be 0 of a sum that overflowed."""
    return tl.where(total == float("inf"), float("nan"), total)


@triton.jit
def share_of(t, total, inverse):
    """t / total, given inverse = 1 / total: one step of Newton's makes t / t one."""
    quotient = t * inverse
    return tl.fma(tl.fma(-quotient, total, t), inverse, quotient)


@triton.jit
def sums(target, scores, indices, row, K, BLOCK: tl.constexpr):
    """Sum of the target, largest score and sum of exp(score - largest) of a row that is read in blocks."""
    totals = tl.zeros([BLOCK], tl.float32)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    masses = tl.zeros([BLOCK], tl.float32)
    for first in range(0, K, BLOCK):
        t, score, _, _, _ = read(target, scores, indices, row, K, first, BLOCK)
        totals += t
        higher = tl.maximum(tops, score)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        masses = masses * tl.exp(tops - shift) + tl.exp(score - shift)
        tops = higher
    top = tl.max(tops, 0)
    return not_infinite(tl.sum(totals, 0)), top, tl.sum(masses * tl.exp(tops - top), 0)


@triton.jit
def _terms(share, log_p, p):
    """share (log share - log p) - share + p."""
    d = tl.log(share) - log_p
    series = 2.505210839e-8  # 1/11!
    series = 2.755731922e-7 - d * series
    series = 2.755731922e-6 - d * series
    series = 2.480158730e-5 - d * series
    series = 1.984126984e-4 - d * series
    series = 1.388888889e-3 - d * series
    series = 8.333333333e-3 - d * series
    series = 4.166666667e-2 - d * series
    series = 1.666666667e-1 - d * series
    series = 5.000000000e-1 - d * series
    term = tl.where(tl.abs(d) < 1.0, share * (d * d * series), share * d - share + p)
    return tl.where(share == 0.0, p, term)


@triton.jit(do_not_specialize=["width"])
def _forward(target, scores, indices, kl, width, LANES: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    K = width * LANES
    if WHOLE:
        t, score, _, _, _ = read(target, scores, indices, row, K, 0, BLOCK)
        total = not_infinite(tl.sum(t, 0))
        share = share_of(t, total, 1.0 / total)
        distance = score - tl.max(score, 0)
        weight = tl.exp(distance)
        mass = tl.sum(weight, 0)
        value = tl.sum(_terms(share, distance - tl.log(mass), weight * (1.0 / mass)), 0)
    else:
        total, top, mass = sums(target, scores, indices, row, K, BLOCK)
        values = tl.zeros([BLOCK], tl.float32)
        for first in range(0, K, BLOCK):
            t, score, _, _, _ = read(target, scores, indices, row, K, first, BLOCK)
            share = share_of(t, total, 1.0 / total)
            distance = score - top
            values += _terms(share, distance - tl.log(mass), tl.exp(distance) * (1.0 / mass))
        value = tl.sum(values, 0)
    tl.store(kl + row, tl.where(total < 1e-10, 0.0, value))


forward = Variants(_forward, torch.float32, torch.float32, torch.int32, torch.float32, 1)
