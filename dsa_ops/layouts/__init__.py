"""Layouts: row bounds for every way of laying out sequences, and forms of a selection. Pure tensor functions."""

from dsa_ops.layouts.bounds import batched_bounds, packed_bounds, position_bounds
from dsa_ops.layouts.context_parallel import CPLayout, PackedCPLayout, contiguous_cp, zigzag_cp
from dsa_ops.layouts.packing import pack_batch, unpack_batch
from dsa_ops.layouts.topk_format import compact_topk, expand_topk, sort_topk_by_index

__all__ = [
    "CPLayout",
    "PackedCPLayout",
    "batched_bounds",
    "compact_topk",
    "contiguous_cp",
    "expand_topk",
    "pack_batch",
    "packed_bounds",
    "position_bounds",
    "sort_topk_by_index",
    "unpack_batch",
    "zigzag_cp",
]
