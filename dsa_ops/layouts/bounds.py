"""Row bounds: which keys each query row may see.

"bounds" is a pair (starts, ends) of int32 vectors; row t sees key rows starts[t] <= s < ends[t]. A row that sees
nothing has starts == ends.

Nothing here reads a tensor back when the sizes are given as host integers, so the functions run inside
torch.compile(fullgraph=True), torch.export and CUDA graph capture. Values are checked on CPU, elsewhere with
validate=True at the price of a sync; while tracing never.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from dsa_ops.layouts import _checks as check


def packed_bounds(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    num_rows: int | None = None,
    causal: bool = True,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_k_padded: Tensor | None = None,
    validate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Bounds of sequences packed one after another; every row sees keys of its own sequence only.

    Shapes: N sequences, T query rows.

    Args:
        cu_seqlens_q [N+1]: int32 or int64, running total of the sequences' query lengths, starting at 0.
        cu_seqlens_k [N+1]: the same for keys; default: as the queries (cu_seqlens_q, and cu_seqlens_q_padded unless
            cu_seqlens_k_padded is given).
        num_rows: T, a host integer. Left out it is read from the end of cu_seqlens_q_padded or cu_seqlens_q, a sync on
            a CUDA device and a graph break under compile.
        causal: a query sees its own position and what precedes it, with the last query aligned to the last key: of 2
            queries over 5 keys the first sees 4. Of 5 queries over 2 keys the first three see nothing.
            False: a query sees all keys of its sequence.
        cu_seqlens_q_padded [N+1]: where the sequences begin in memory, if there are padding rows between them: sequence
            i has its rows from cu_seqlens_q_padded[i] on, as many as cu_seqlens_q says, the rest up to
            cu_seqlens_q_padded[i+1] is padding.
        cu_seqlens_k_padded [N+1]: the same for keys. With cu_seqlens_k but without this the keys have no padding.
        validate: check values on a CUDA device too.

    Returns:
        (starts [T], ends [T]), int32, neither ever going down from one row to the next. Padding rows and rows beyond
        the last sequence are empty (starts == ends).

    Raises:
        TypeError, ValueError: an argument's type, dtype, rank, length or device does not fit. Where values are read,
            also: cu_seqlens that do not start at 0, decrease or reach 2**31; padded lengths below the real ones; fewer
            rows than cu_seqlens names.
    """
    op = "packed_bounds"
    check.int_vector(op, "cu_seqlens_q", cu_seqlens_q, "N+1")
    size, device = cu_seqlens_q.shape[0], cu_seqlens_q.device
    if size < 1:
        raise ValueError(f"{op}: cu_seqlens_q must have at least one entry, got {check.describe(cu_seqlens_q)}")
    for name, other in (
        ("cu_seqlens_k", cu_seqlens_k),
        ("cu_seqlens_q_padded", cu_seqlens_q_padded),
        ("cu_seqlens_k_padded", cu_seqlens_k_padded),
    ):
        if other is not None:
            check.int_vector(op, name, other, "N+1", size, device)
    if num_rows is not None:
        check.host_size(op, "num_rows", num_rows)
        check.row_count(op, "num_rows", num_rows)
    if check.readable(cu_seqlens_q, validate):
        q_total = check_cu_seqlens(op, "cu_seqlens_q", cu_seqlens_q, "cu_seqlens_q_padded", cu_seqlens_q_padded)
        if cu_seqlens_k is not None:
            check_cu_seqlens(op, "cu_seqlens_k", cu_seqlens_k, "cu_seqlens_k_padded", cu_seqlens_k_padded)
        elif cu_seqlens_k_padded is not None:
            check_cu_seqlens(op, "cu_seqlens_q", cu_seqlens_q, "cu_seqlens_k_padded", cu_seqlens_k_padded)
        if num_rows is not None and num_rows < q_total:
            named_by = "cu_seqlens_q" if cu_seqlens_q_padded is None else "cu_seqlens_q_padded"
            raise ValueError(
                f"{op}: num_rows must be at least the {q_total} rows that {named_by} names, got {num_rows}"
            )

    q_places = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
    if cu_seqlens_k_padded is not None:
        k_places = cu_seqlens_k_padded
    else:
        k_places = q_places if cu_seqlens_k is None else cu_seqlens_k
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    if num_rows is None:
        num_rows = check.last_entry(op, "num_rows", q_places)

    rows = torch.arange(num_rows, device=device, dtype=q_places.dtype)
    sequence = sequence_of_rows(q_places[1:], num_rows)
    return bounds_of_rows(rows, sequence, cu_seqlens_q, cu_seqlens_k, q_places, k_places, causal)


def sequence_of_rows(ends: Tensor, num_rows: int) -> Tensor:
    """The number of the sequence that each of the rows 0 .. num_rows - 1 lies in, int64; behind the last end, N.

    Shapes: ends [N], one past the last row of each sequence, padding included; the result [num_rows].

    Counted, not searched for: of a slice such as cu_seqlens[1:], `torch.searchsorted` under TorchInductor forgets where
    it begins (pytorch/pytorch#182343), and every row would see the keys of the wrong sequence.
    """
    at = ends.clamp(0, num_rows).to(torch.int64)
    counts = torch.zeros(num_rows + 1, dtype=torch.int64, device=ends.device)
    return counts.index_add(0, at, torch.ones_like(at)).cumsum(0).narrow(0, 0, num_rows)


def bounds_of_rows(
    rows: Tensor,
    sequence: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    q_places: Tensor,
    k_places: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """What `packed_bounds` says of these rows of the pack [T], in any order and in the dtype of q_places; no checks.

    sequence [T] is that of each row, N behind the last one: a sequence of length 0. cu_seqlens count real rows and
    keys, places say where in memory each sequence begins.
    """
    q_length = F.pad(cu_seqlens_q.diff(), (0, 1))[sequence]
    k_length = F.pad(cu_seqlens_k.diff(), (0, 1))[sequence]
    position = rows - q_places[sequence]
    first = k_places[sequence]
    visible = (position + 1 + k_length - q_length).clamp(min=0) if causal else k_length
    real = position < q_length
    # an empty row stands behind its sequence's keys, so that the bounds of a tile of rows stay close together
    starts = torch.where(real, first, first + k_length)
    ends = torch.where(real, first + visible, starts)
    return starts.to(torch.int32), ends.to(torch.int32)


def batched_bounds(
    batch: int,
    q_len: int,
    k_len: int,
    *,
    causal: bool = True,
    lengths: Tensor | None = None,
    device: torch.device | str | None = None,
    validate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Bounds of a rectangular batch after `pack_batch`: rows and keys of sequence b follow those of sequence b - 1.

    Args:
        batch, q_len, k_len: host integers: number of sequences, query rows of each, key rows of each.
        causal: as in `packed_bounds`: the last query is aligned with the last key.
        lengths [batch]: int32 or int64, real rows and keys of each sequence; what follows is padding: rows see nothing,
            keys are seen by no row. Only for q_len == k_len. Padding in front is not covered: `position_bounds` is.
        device: of the result; default: that of lengths, or torch's default device.
        validate: check lengths on a CUDA device too.

    Returns:
        (starts [batch * q_len], ends [batch * q_len]), int32, in key rows of the packed keys.

    Raises:
        TypeError, ValueError: a size or lengths does not fit, or a length is not in [0, q_len] where values are read.
    """
    op = "batched_bounds"
    for name, size in (("batch", batch), ("q_len", q_len), ("k_len", k_len)):
        check.host_size(op, name, size)
        check.row_count(op, name, size)
    check.row_count(op, "batch * q_len", batch * q_len)
    check.row_count(op, "batch * k_len", batch * k_len)
    if lengths is not None:
        check.int_vector(op, "lengths", lengths, "batch", batch)
        if q_len != k_len:
            raise ValueError(f"{op}: lengths needs q_len == k_len, got q_len = {q_len}, k_len = {k_len}")
        if device is None:
            device = lengths.device
        elif lengths.device != torch.empty(0, device=device).device:  # "cuda" is the current one
            raise ValueError(f"{op}: lengths must be on {device}, got {lengths.device}")
        if check.readable(lengths, validate):
            for number, length in enumerate(lengths.tolist()):
                if not 0 <= length <= q_len:
                    raise ValueError(f"{op}: lengths must be in [0, {q_len}], got {length} for sequence {number}")

    rows = torch.arange(q_len, dtype=torch.int32, device=device).expand(batch, q_len)
    starts = (torch.arange(batch, dtype=torch.int32, device=device) * k_len)[:, None].expand(batch, q_len)
    if lengths is None:
        visible = (rows + (1 + k_len - q_len)).clamp(min=0) if causal else torch.full_like(rows, k_len)
    else:
        length = lengths.to(torch.int32)[:, None].expand(batch, q_len)
        real = rows < length
        starts = torch.where(real, starts, starts + length)
        visible = torch.where(real, rows + 1 if causal else length, 0)
    return starts.reshape(-1), (starts + visible).reshape(-1)


def position_bounds(
    positions: Tensor,
    segment_starts: Tensor,
    segment_ends: Tensor,
    *,
    causal: bool = True,
    validate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Bounds of rows in any order, each with its place given: decoding chunks, rows of another rank, padding in front.

    Args:
        positions [T]: int32 or int64, the row's position inside its segment, counted from 0.
        segment_starts [T], segment_ends [T]: int32 or int64, first and one-past-last key row of the row's segment.
            Equal for a row that sees nothing.
        causal: the row sees keys up to its own position, at most the whole segment. False: the whole segment.
        validate: check values on a CUDA device too.

    Returns:
        (starts [T], ends [T]), int32.

    Raises:
        TypeError, ValueError: a type, dtype, rank, length or device does not fit; where values are read, also a
            negative position or start, an end before its start, and an end of 2**31 or more.
    """
    op = "position_bounds"
    check.int_vector(op, "positions", positions, "T")
    rows, device = positions.shape[0], positions.device
    check.int_vector(op, "segment_starts", segment_starts, "T", rows, device)
    check.int_vector(op, "segment_ends", segment_ends, "T", rows, device)
    if check.readable(positions, validate):
        _check_segments(op, positions, segment_starts, segment_ends)
    visible = segment_ends - segment_starts
    if causal:
        visible = torch.minimum(positions, visible - 1) + 1  # in this order a huge position cannot overflow
    return segment_starts.to(torch.int32), (segment_starts + visible.clamp(min=0)).to(torch.int32)


def check_cu_seqlens(op: str, real_name: str, real: Tensor, padded_name: str, padded: Tensor | None) -> int:
    """Values of one cu_seqlens and of its padded companion; returns the number of rows they name."""
    for name, cu_seqlens in ((real_name, real), (padded_name, padded)):
        if cu_seqlens is None:
            continue
        values = cu_seqlens.tolist()
        if values[0] != 0:
            raise ValueError(f"{op}: {name} must start at 0, got {values[0]}")
        for number, (left, right) in enumerate(pairwise(values)):
            if right < left:
                raise ValueError(f"{op}: {name} must not decrease, got {right} after {left} at entry {number + 1}")
        check.row_count(op, f"the last entry of {name}", values[-1])
    if padded is None:
        return int(real[-1])
    for number, (room, length) in enumerate(zip(padded.diff().tolist(), real.diff().tolist(), strict=True)):
        if room < length:
            raise ValueError(
                f"{op}: {padded_name} must leave room for each sequence of {real_name}, "
                f"got {room} rows for the {length} of sequence {number}"
            )
    return int(padded[-1])


def _check_segments(op: str, positions: Tensor, segment_starts: Tensor, segment_ends: Tensor) -> None:
    for name, wrong, value, want in (
        ("positions", positions < 0, positions, "not be negative"),
        ("segment_starts", segment_starts < 0, segment_starts, "not be negative"),
        ("segment_ends", segment_ends < segment_starts, segment_ends, "not precede segment_starts"),
        ("segment_ends", segment_ends > check.MAX_ROWS - 1, segment_ends, "be below 2**31 (bounds are int32)"),
    ):
        rows = wrong.nonzero()
        if rows.shape[0]:
            row = int(rows[0])
            start = f" with start {int(segment_starts[row])}" if name == "segment_ends" else ""
            raise ValueError(f"{op}: {name} must {want}, got {int(value[row])}{start} at row {row}")
