"""Rows added up by key, reproducibly: the last step of gradients of keys that must have the same bits in every run.

`add_by_key(into [S, D], contributions [N, D], ids [N])` adds to row s of `into` every contribution whose id is s. No
atomics, no host sync, and workspace from torch's allocator, so a CUDA graph can capture it.

Work       a stable sort of the ids; then one program of one warp adds the contributions of one key in 128 columns, four
           neighbouring columns per lane, eight rows in flight. Offsets into rows are 64-bit.
Order      a left fold: into[s], then the contributions of s in the order in which they stand. So cutting the
           contributions in two, in order, and calling twice gives the same bits as calling once, long keys aside.
Long keys  a key with more than PIECE contributions, which would keep one program busy for long, is cut into pieces of
           PIECE, each folded by itself, and the sums of the pieces are folded into `into` in order. Where its pieces
           begin depends on this key alone: the bits of a row never depend on other keys.
Ids        outside [0, S) are skipped, what they contribute is never read.
Budget     no shared memory, 56 registers; about 24 bytes of workspace per contribution (sorted ids, order, the sort
           itself) and, where N > PIECE, 8 D N / PIECE bytes.
Bound      reading the contributions once.
Compiles   per D; N, S are run-time arguments.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from csrc_tilelang._arguments import dense
from csrc_tilelang._triton import Variants

VARIANTS: list = []  # none for tools/lower_check: Triton compiles these itself

PIECE = 1024
COLUMNS = 128  # of one program
ROWS = 8  # loads in flight per lane


def add_by_key(into: Tensor, contributions: Tensor, ids: Tensor) -> None:
    """into[s] += sum of contributions[n] over ids[n] == s, in place, in a fixed order.

    Args:
        into [S, D]: float32, contiguous.
        contributions [N, D]: float32.
        ids [N]: int32; others than 0 <= id < S are skipped.
    """
    keys, width = into.shape
    count = ids.shape[0]
    if into.dtype != torch.float32 or contributions.dtype != torch.float32 or ids.dtype != torch.int32:
        raise TypeError(
            f"add_by_key adds float32 to float32 by int32 ids, got {contributions.dtype}, {into.dtype}, {ids.dtype}"
        )
    if contributions.shape != (count, width) or not into.is_contiguous():
        raise ValueError(
            f"add_by_key takes contiguous into [S, D], contributions [N, D] and ids [N], got {tuple(into.shape)}, "
            f"{tuple(contributions.shape)} and {tuple(ids.shape)}"
        )
    if count == 0 or keys == 0 or width == 0:
        return
    contributions = dense(contributions)
    sorted_ids, order = torch.sort(ids, stable=True)
    # starts[s] is where key s begins in sorted order, starts[S] where the last one ends
    starts = torch.searchsorted(sorted_ids, torch.arange(keys + 1, device=ids.device, dtype=ids.dtype), out_int32=True)
    blocks = triton.cdiv(width, COLUMNS)
    constants = width, COLUMNS, ROWS, PIECE
    sums = contributions  # anything: it is read where a key is long, which takes more than PIECE contributions
    if count > PIECE:
        slots = 2 * triton.cdiv(count, PIECE)
        sums = torch.empty(slots, width, dtype=torch.float32, device=into.device)
        run = pieces(*constants, warps=1)[slots, blocks, 1]
        run(sums, contributions, sorted_ids, order, starts, count, keys, *constants)
    add(*constants, warps=1)[keys, blocks, 1](into, sums, contributions, order, starts, *constants)


@triton.jit
def _fold(total, rows, order, first, last, columns, D: tl.constexpr, ROWS: tl.constexpr):
    """total + rows[order[first]] + ... + rows[order[last - 1]], from left to right."""
    for n in range(first, last, ROWS):
        for i in tl.static_range(ROWS):
            inside = n + i < last
            row = tl.load(order + n + i, mask=inside, other=0).to(tl.int64)
            width = tl.where(inside, D, 0)
            total += tl.load(rows + row * D + columns, mask=columns < width, other=-0.0)  # x + -0.0 is x, also for -0.0
    return total


@triton.jit
def _slot(start, piece, PIECE: tl.constexpr):
    """The row of `sums` that holds a piece of a long key, which begins at `start` in sorted order.

    Two for each stretch of PIECE positions: at most one key's first piece begins there, and one piece that is no first.
    """
    return 2 * (start // PIECE + piece) + tl.minimum(piece, 1)


@triton.jit(do_not_specialize=["count", "keys"])
def _sum_pieces(
    sums,
    rows,
    sorted_ids,
    order,
    starts,
    count,
    keys,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
):
    slot = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    chunk, is_later = slot // 2, slot % 2
    # A long key covers the end of the chunk where it begins, and the start of those where later pieces begin
    covered = tl.where(is_later == 1, chunk * PIECE, tl.minimum(chunk * PIECE + PIECE - 1, count - 1))
    key = tl.load(sorted_ids + covered).to(tl.int64)
    valid = (key >= 0) & (key < keys)
    start = tl.load(starts + key, mask=valid, other=0)
    end = tl.load(starts + key + 1, mask=valid, other=0)
    first = start + (chunk - start // PIECE) * PIECE
    if (end - start > PIECE) & (first < end) & (_slot(start, chunk - start // PIECE, PIECE) == slot):
        total = _fold(
            tl.zeros([COLUMNS], tl.float32), rows, order, first, tl.minimum(first + PIECE, end), columns, D, ROWS
        )
        tl.store(sums + slot.to(tl.int64) * D + columns, total, mask=columns < D)


@triton.jit(do_not_specialize_on_alignment=["into"])
def _add(
    into,
    sums,
    rows,
    order,
    starts,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
):
    key = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(starts + key)
    end = tl.load(starts + key + 1)
    if start < end:
        row = into + key.to(tl.int64) * D + columns
        total = tl.load(row, mask=columns < D, other=0.0)
        if end - start <= PIECE:
            total = _fold(total, rows, order, start, end, columns, D, ROWS)
        else:
            for piece in range(tl.cdiv(end - start, PIECE)):
                slot = _slot(start, piece, PIECE).to(tl.int64)
                total += tl.load(sums + slot * D + columns, mask=columns < D, other=0.0)
        tl.store(row, total, mask=columns < D)


pieces = Variants(_sum_pieces, torch.float32, torch.float32, torch.int32, torch.int64, torch.int32, 1, 1)
add = Variants(_add, torch.float32, torch.float32, torch.float32, torch.int64, torch.int32)
