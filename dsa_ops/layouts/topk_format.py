"""Forms of a selection: ids in ascending order, valid ids first with a length, or -1 in every empty slot.

An id is valid when it is not negative. Every function takes any leading dimensions, [T, K] and [B, L, K] alike, keeps
the dtype of the ids, reads nothing back and breaks no graph.
"""

import torch
from torch import Tensor

from dsa_ops.layouts import _checks as check


def sort_topk_by_index(indices: Tensor, scores: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Every row's slots in ascending order of their ids, empty slots last: the order of `dsa_ops.indexer_topk`.

    Ranks that selected the same keys in different orders agree slot by slot after this.

    Args:
        indices [..., K]: int32 or int64 key ids.
        scores [..., K]: floating point; differentiable.
        valid [..., K]: bool; default: indices >= 0. Scores say nothing about validity: a real key may score -inf. A
            negative id is invalid whatever `valid` says.

    Returns:
        (indices, scores, valid), new tensors of the same shapes: ids ascending, equal ids in their old order, then -1
        with score -inf and valid False.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    op = "sort_topk_by_index"
    check.ids(op, "indices", indices)
    check.tensor(op, "scores", scores)
    if not scores.is_floating_point():
        raise TypeError(f"{op}: scores must be floating point, got {check.describe(scores)}")
    _same_place(op, "scores", scores, indices)
    if valid is None:
        valid = indices >= 0
    else:
        check.tensor(op, "valid", valid)
        if valid.dtype != torch.bool:
            raise TypeError(f"{op}: valid must be torch.bool, got {check.describe(valid)}")
        _same_place(op, "valid", valid, indices)
        valid = valid & (indices >= 0)
    last = torch.iinfo(indices.dtype).max
    ids, order = torch.where(valid, indices, last).sort(dim=-1, stable=True)
    valid = valid.gather(-1, order)
    return torch.where(valid, ids, -1), torch.where(valid, scores.gather(-1, order), -torch.inf), valid


def compact_topk(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Valid ids first, in their old order, and how many there are.

    Args:
        indices [..., K]: int32 or int64 key ids, a negative one for an empty slot, anywhere.

    Returns:
        (indices [..., K], topk_length [...]): the ids with -1 behind them, and int32 numbers of valid ids.

    Raises:
        TypeError, ValueError: the dtype or rank of indices does not fit.
    """
    check.ids("compact_topk", "indices", indices)
    valid = indices >= 0
    order = (~valid).to(torch.uint8).sort(dim=-1, stable=True).indices
    length = valid.sum(dim=-1, dtype=torch.int32)
    return expand_topk(indices.gather(-1, order), length), length


def expand_topk(indices: Tensor, topk_length: Tensor) -> Tensor:
    """-1 in every slot at or past the row's length, whatever it holds, and in place of every other negative id.

    Args:
        indices [..., K]: int32 or int64 key ids.
        topk_length [...]: int32 or int64, slots in use; below 0 counts as 0, above K as K.

    Returns:
        indices [..., K], a new tensor.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit.
    """
    op = "expand_topk"
    check.ids(op, "indices", indices)
    check.tensor(op, "topk_length", topk_length)
    if topk_length.dtype not in check.INTS:
        raise TypeError(f"{op}: topk_length must be int32 or int64, got {check.describe(topk_length)}")
    if topk_length.shape != indices.shape[:-1]:
        want = [*indices.shape[:-1]]
        raise ValueError(f"{op}: topk_length must have shape {want} like indices, got {check.describe(topk_length)}")
    if topk_length.device != indices.device:
        raise ValueError(f"{op}: topk_length must be on {indices.device} like indices, got {topk_length.device}")
    slots = torch.arange(indices.shape[-1], device=indices.device, dtype=topk_length.dtype)
    return torch.where((slots < topk_length.unsqueeze(-1)) & (indices >= 0), indices, -1)


def _same_place(op: str, name: str, x: Tensor, indices: Tensor) -> None:
    if x.shape != indices.shape:
        raise ValueError(f"{op}: {name} must have shape {[*indices.shape]} like indices, got {check.describe(x)}")
    if x.device != indices.device:
        raise ValueError(f"{op}: {name} must be on {indices.device} like indices, got {x.device}")
