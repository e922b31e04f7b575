"""Context parallel: which rows of a pack each rank holds, what they see, and the way back to global order.

A pack of `total` rows is shared out over C ranks, total / C rows each. Queries stay on their rank; keys are gathered
rank after rank and put into global order by `gather_order`, so ids and bounds are global rows everywhere:

    layout = zigzag_cp(cu_seqlens, cp_size, cp_rank, total=total)
    k = all_gather(k_local)[layout.gather_order]
    indexer_topk(q_local, k, weights_local, starts=layout.starts, ends=layout.ends, topk=topk)

With `total` given, nothing is read back and no graph breaks: torch.compile(fullgraph=True), torch.export and CUDA graph
capture work. Left out, it is the last entry of cu_seqlens_padded or cu_seqlens, a sync on a CUDA device. Rows behind
the last sequence are padding: they see nothing, are seen by nothing, and every rank gets an equal run of them, behind
its other rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree

from dsa_ops.layouts import _checks as check
from dsa_ops.layouts.bounds import bounds_of_rows, check_cu_seqlens, sequence_of_rows


class CPLayout(NamedTuple):
    """One rank's part of a pack of S rows, T = S / cp_size of them here.

    rows [T]: int64, global row of each local row: x_local = x[rows].
    starts, ends [T]: int32, bounds of each local row in global key rows. `rows - starts` is a row's position in its
        sequence (what rotary tables take); of a padding row some number that is not negative.
    gather_order [S]: int64, puts rows gathered rank after rank into global order: x = x_gathered[gather_order].
    gather_inverse [S]: int64, the reverse: x_gathered = x[gather_inverse].

    Both orders are the same on every rank.
    """

    rows: Tensor
    starts: Tensor
    ends: Tensor
    gather_order: Tensor
    gather_inverse: Tensor


def zigzag_cp(
    cu_seqlens: Tensor,
    cp_size: int,
    cp_rank: int,
    *,
    total: int | None = None,
    causal: bool = True,
    cu_seqlens_padded: Tensor | None = None,
    validate: bool = False,
) -> CPLayout:
    """Every sequence cut into 2 * cp_size equal chunks, of which rank r holds chunks r and 2 * cp_size - 1 - r.

    So every rank has as many rows as the others, and in causal attention as many pairs of query and key. A rank's rows
    are those of the first sequence (front chunk, back chunk), then of the second, and so on.

    Shapes: N sequences, S = total rows in the pack, T = S / cp_size on this rank.

    Args:
        cu_seqlens [N+1]: int32 or int64, running total of the sequences' lengths, starting at 0.
        cp_size, cp_rank: host integers, 0 <= cp_rank < cp_size.
        total: S, a host integer that divides by cp_size, at least the rows that the sequences take. Rows behind these
            are padding, see above. Default: exactly the sequences' rows (a sync on a CUDA device, a graph break under
            compile).
        causal: a row sees keys up to its own position; False: its whole sequence.
        cu_seqlens_padded [N+1]: where the sequences begin in memory, if there are padding rows between them: cu_seqlens
            then counts real rows alone. Padded lengths are what is cut into chunks. Padding rows are empty.
        validate: check values on a CUDA device too.

    Raises:
        TypeError, ValueError: an argument's type, dtype, rank, length or device does not fit; cp_rank is not below
            cp_size; total does not divide by cp_size. Where values are read, also: a length (a padded length, where
            cu_seqlens_padded is given) that does not divide by 2 * cp_size; a total smaller than the sequences' rows;
            cu_seqlens that do not start at 0, decrease or reach 2**31; padded lengths below the real ones.
    """
    op = "zigzag_cp"
    places, total = _places(op, cu_seqlens, cp_size, cp_rank, total, cu_seqlens_padded, True, validate)
    share = total // cp_size
    device = places.device
    local = torch.arange(share, device=device)
    ranks = torch.arange(cp_size, device=device)[:, None]
    shares = places // cp_size  # where the sequences begin on every rank
    sequence = sequence_of_rows(shares[1:], share)
    offset = local - shares[sequence]
    half = F.pad(places.diff() // (2 * cp_size), (0, 1))[sequence]
    back = offset >= half
    position = torch.where(back, (2 * cp_size - 2 - ranks) * half, ranks * half) + offset
    beyond = ranks * (share - shares[-1]) + offset
    rows = places[sequence] + torch.where(sequence == places.shape[0] - 1, beyond, position)
    inverse = rows.flatten().clamp(0, total - 1)  # beyond them only with lengths that nobody could check
    order = torch.zeros_like(inverse).scatter(0, inverse, torch.arange(inverse.shape[0], device=device))
    mine = inverse.narrow(0, cp_rank * share, share).clone()
    starts, ends = bounds_of_rows(mine, sequence, cu_seqlens, cu_seqlens, places, places, causal)
    return CPLayout(mine, starts, ends, order, inverse)


def contiguous_cp(
    cu_seqlens: Tensor,
    cp_size: int,
    cp_rank: int,
    *,
    total: int | None = None,
    causal: bool = True,
    cu_seqlens_padded: Tensor | None = None,
    validate: bool = False,
) -> CPLayout:
    """The pack cut into cp_size equal runs of rows, wherever its sequences begin and end; rank r holds run r.

    Gathered rows are in global order already: gather_order and gather_inverse count from 0. In causal attention later
    ranks have more to do than earlier ones.

    Args, Raises: as `zigzag_cp`, but sequences may have any length; only total must divide by cp_size. For a pack whose
        rows do not, give the next larger total and as many padding rows.
    """
    op = "contiguous_cp"
    places, total = _places(op, cu_seqlens, cp_size, cp_rank, total, cu_seqlens_padded, False, validate)
    share = total // cp_size
    rows = torch.arange(share, device=places.device) + cp_rank * share
    order = torch.arange(cp_size * share, device=places.device)
    sequence = sequence_of_rows(places[1:], total).narrow(0, cp_rank * share, share)
    starts, ends = bounds_of_rows(rows, sequence, cu_seqlens, cu_seqlens, places, places, causal)
    return CPLayout(rows, starts, ends, order, order.clone())


class PackedCPLayout(NamedTuple):
    """Zigzag context parallel as a list of causal segments, for backends that know cu_seqlens and no bounds.

    Each of this rank's 2N chunks (front and back of sequence 0, of sequence 1, ...) is a segment: its queries, and the
    keys from its sequence's beginning to the chunk's end. Queries are aligned to the last keys, so causal attention
    inside the segment is causal attention of the chunk. The keys of all segments stand one after another in
    k[source_indices], most of them more than once: at cp_size 2 that is 1.25 times k. The ops of this package need
    none of this, the bounds of `zigzag_cp` are enough.

    Shapes: N sequences, S key rows of the pack, P = S + S // (2 * cp_size).

    segment_q_lengths, segment_k_lengths [2N]: int32, query rows and keys of each segment.
    segment_cu_q, segment_cu_k [2N+1]: int32, their running totals, starting at 0.
    segment_key_starts [2N]: int32, global key row where the segment's keys begin.
    source_indices [P]: int64, global key row of each position in the segments' keys. Positions from segment_cu_k[-1]
        on, which exist where `total` is more than the sequences' rows, belong to no segment and name the last row.

    Padding rows between sequences (cu_seqlens_padded) are rows of their segment like others: padding stands behind the
    real rows, so no real query sees it; what a padding query selects is to be thrown away. `segment_bounds` leaves it
    empty. Rows behind the last sequence are in no segment.
    """

    segment_q_lengths: Tensor
    segment_k_lengths: Tensor
    segment_cu_q: Tensor
    segment_cu_k: Tensor
    segment_key_starts: Tensor
    source_indices: Tensor

    @classmethod
    def build(
        cls,
        cu_seqlens: Tensor,
        cp_size: int,
        cp_rank: int,
        *,
        total: int | None = None,
        cu_seqlens_padded: Tensor | None = None,
        validate: bool = False,
    ) -> "PackedCPLayout":
        """The segments of one rank; arguments and errors as `zigzag_cp`. Causal only."""
        op = "PackedCPLayout.build"
        places, total = _places(op, cu_seqlens, cp_size, cp_rank, total, cu_seqlens_padded, True, validate)
        positions = total + total // (2 * cp_size)
        check.row_count(op, "total + total // (2 * cp_size)", positions)
        lengths = places.diff()
        half = lengths // (2 * cp_size)
        q_lengths = torch.stack((half, half), 1).flatten()
        k_lengths = torch.stack(((cp_rank + 1) * half, lengths - cp_rank * half), 1).flatten()
        cu_q, cu_k = (F.pad(x.cumsum(0), (1, 0)) for x in (q_lengths, k_lengths))
        key_starts = torch.stack((places[:-1], places[:-1]), 1).flatten()
        position = torch.arange(positions, device=places.device)
        segment = sequence_of_rows(cu_k[1:], positions)
        source = F.pad(key_starts - cu_k[:-1], (0, 1))[segment] + position
        source = torch.where(segment < key_starts.shape[0], source, total - 1).clamp(0, total - 1)
        q_lengths, k_lengths, cu_q, cu_k, key_starts = (
            x.to(torch.int32) for x in (q_lengths, k_lengths, cu_q, cu_k, key_starts)
        )
        return cls(q_lengths, k_lengths, cu_q, cu_k, key_starts, source)

    def to_global(self, indices: Tensor, *, validate: bool = False) -> Tensor:
        """Global key rows of positions in the segments' keys, as a selection among k[source_indices] names them.

        Args:
            indices [..., K]: int32 or int64 positions; a negative one is an empty slot and becomes -1.
            validate: check values on a CUDA device too.

        Returns:
            A new tensor of the same shape and dtype.

        Raises:
            TypeError, ValueError: the dtype or device of indices does not fit.
            IndexError: a position in no segment (segment_cu_k[-1] or more), where values are read: on CPU, elsewhere
                with validate=True. Where they are not, such a position becomes -1.
        """
        op = "PackedCPLayout.to_global"
        check.ids(op, "indices", indices, self.source_indices.device)
        used = self.segment_cu_k[-1]
        valid = (indices >= 0) & (indices < used)
        if check.readable(indices, validate):
            wrong = indices[indices >= used]
            if wrong.numel():
                raise IndexError(
                    f"{op}: indices must be below {int(used)}, the number of keys in the segments, got {int(wrong[0])}"
                )
        if self.source_indices.shape[0] == 0:  # nothing to look up, so no position is valid
            return torch.full_like(indices, -1)
        found = self.source_indices[torch.where(valid, indices, 0)]
        return torch.where(valid, found, -1).to(indices.dtype)

    def segment_bounds(self, starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds of this rank's rows in positions of the segments' keys, from those in global key rows.

        Args:
            starts, ends [T]: int32 or int64, of this rank's rows in their order: `zigzag_cp(...).starts`, `.ends`.

        Returns:
            (starts [T], ends [T]), int32: the part of each range that lies in the row's segment.

        Raises:
            TypeError, ValueError: a dtype, rank, length or device does not fit.
        """
        op = "PackedCPLayout.segment_bounds"
        device = self.source_indices.device
        check.int_vector(op, "starts", starts, "T", device=device)
        check.int_vector(op, "ends", ends, "T", starts.shape[0], device)
        segment = sequence_of_rows(self.segment_cu_q[1:], starts.shape[0])
        shift = F.pad(self.segment_cu_k[:-1] - self.segment_key_starts, (0, 1))[segment]
        low, high = self.segment_cu_k[segment], F.pad(self.segment_cu_k, (0, 1))[segment + 1]
        high = torch.maximum(low, high)  # a row in no segment stands behind the last one, empty
        # bounds may be anything: in int64 a shifted one cannot overflow
        starts, ends = (x.to(torch.int64).clamp(0, check.MAX_ROWS) for x in (starts, ends))
        first = torch.minimum(torch.maximum(starts + shift, low), high)
        last = torch.minimum(torch.maximum(ends + shift, first), high)
        return first.to(torch.int32), last.to(torch.int32)


def _places(
    op: str,
    cu_seqlens: Tensor,
    cp_size: int,
    cp_rank: int,
    total: int | None,
    cu_seqlens_padded: Tensor | None,
    zigzag: bool,
    validate: bool,
) -> tuple[Tensor, int]:
    """Checks what all functions take; returns where in memory the sequences begin (int64 [N+1]) and `total`."""
    check.int_vector(op, "cu_seqlens", cu_seqlens, "N+1")
    size, device = cu_seqlens.shape[0], cu_seqlens.device
    if size < 1:
        raise ValueError(f"{op}: cu_seqlens must have at least one entry, got {check.describe(cu_seqlens)}")
    name, places = "cu_seqlens", cu_seqlens
    if cu_seqlens_padded is not None:
        check.int_vector(op, "cu_seqlens_padded", cu_seqlens_padded, "N+1", size, device)
        name, places = "cu_seqlens_padded", cu_seqlens_padded
    check.host_size(op, "cp_size", cp_size, least=1)
    check.host_size(op, "cp_rank", cp_rank)
    if cp_rank >= cp_size:
        raise ValueError(f"{op}: cp_rank must be below cp_size = {cp_size}, got {cp_rank}")
    if total is not None:
        check.host_size(op, "total", total)
        check.row_count(op, "total", total)
    if check.readable(places, validate):
        named = check_cu_seqlens(op, "cu_seqlens", cu_seqlens, "cu_seqlens_padded", cu_seqlens_padded)
        for number, length in enumerate(places.diff().tolist() if zigzag else ()):
            if length % (2 * cp_size):
                raise ValueError(
                    f"{op}: the lengths in {name} must divide by 2 * cp_size = {2 * cp_size}, "
                    f"got {length} for sequence {number}"
                )
        if total is not None and total < named:
            raise ValueError(f"{op}: total must be at least the {named} rows that {name} names, got {total}")
    if total is None:
        total = check.last_entry(op, "total", places)
        if total % cp_size:
            raise ValueError(
                f"{op}: the rows that {name} names must divide by cp_size = {cp_size} where total is not given, "
                f"got {total}"
            )
    elif total % cp_size:
        raise ValueError(f"{op}: total must divide by cp_size = {cp_size}, got {total}")
    return places.to(torch.int64), total


for _cls in (CPLayout, PackedCPLayout):
    torch.serialization.add_safe_globals([_cls])
    _pytree._register_namedtuple(_cls, serialized_type_name=f"dsa_ops.layouts.{_cls.__name__}")
