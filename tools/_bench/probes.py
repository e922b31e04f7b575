"""Two kernels that do nothing but what bounds sparse attention: fetch rows of keys, and add to rows of keys.

A program stands for one query row and walks a list of key numbers, STEP at a time; STEP divides the list's length.
"""

import triton
import triton.language as tl

# (STEP, warps) that are tried
GATHERS = ((16, 4), (32, 8), (8, 4), (16, 8))
REDUCTIONS = ((16, 8), (8, 4))


@triton.jit
def gather(keys, ids, out, COUNT: tl.constexpr, STEP: tl.constexpr):
    """Rows of 1152 bytes, read as 288 int32 (256 + 32 columns, Triton wants powers of two) and folded together."""
    row = tl.program_id(0).to(tl.int64)
    wide, narrow = tl.arange(0, 256), tl.arange(0, 32)
    left = tl.zeros((STEP, 256), tl.int32)
    right = tl.zeros((STEP, 32), tl.int32)
    for first in range(0, COUNT, STEP):
        key = tl.load(ids + row * COUNT + first + tl.arange(0, STEP)).to(tl.int64)
        left ^= tl.load(keys + key[:, None] * 288 + wide[None, :])
        right ^= tl.load(keys + key[:, None] * 288 + 256 + narrow[None, :])
    # so that no load can be left out
    tl.store(out + row * 288 + wide, tl.sum(left, 0))
    tl.store(out + row * 288 + 256 + narrow, tl.sum(right, 0))


@triton.jit
def reduce(keys, ids, COUNT: tl.constexpr, STEP: tl.constexpr):
    """Rows of 2304 bytes: one is added to each of 576 fp32 columns (512 + 64)."""
    row = tl.program_id(0).to(tl.int64)
    wide, narrow = tl.arange(0, 512), tl.arange(0, 64)
    left = tl.full((STEP, 512), 1.0, tl.float32)
    right = tl.full((STEP, 64), 1.0, tl.float32)
    for first in range(0, COUNT, STEP):
        key = tl.load(ids + row * COUNT + first + tl.arange(0, STEP)).to(tl.int64)
        tl.atomic_add(keys + key[:, None] * 576 + wide[None, :], left, sem="relaxed")
        tl.atomic_add(keys + key[:, None] * 576 + 512 + narrow[None, :], right, sem="relaxed")
