"""Batched tensors to packed rows and back."""

import torch
from torch import Tensor

from dsa_ops.layouts import _checks as check


def pack_batch(x: Tensor, batch_first: bool = True) -> Tensor:
    """The rows of all sequences one after another: [B, S, ...] or, with batch_first=False, [S, B, ...] to [B*S, ...].

    Row b * S + s of the result is row s of sequence b, the order `batched_bounds` speaks of. A contiguous [B, S, ...]
    is packed as a view; [S, B, ...] with B > 1 is copied, since its sequences do not lie one after another in memory.

    Raises:
        TypeError, ValueError: x is not a tensor or has less than two dimensions.
    """
    order = "[B, S, ...]" if batch_first else "[S, B, ...]"
    check.tensor("pack_batch", "x", x, f"a tensor of shape {order}")
    if x.dim() < 2:
        raise ValueError(f"pack_batch: x must have shape {order}, got {check.describe(x)}")
    return (x if batch_first else x.transpose(0, 1)).flatten(0, 1)


def unpack_batch(x: Tensor, batch: int, batch_first: bool = True) -> Tensor:
    """The reverse of `pack_batch`: [B*S, ...] to a view [B, S, ...] or, with batch_first=False, [S, B, ...].

    Args:
        x: packed rows, sequence after sequence, all of one length.
        batch: B, a host integer of at least 1.
        batch_first: which of the two shapes to make.

    Raises:
        TypeError, ValueError: x is not a tensor of at least one dimension, or its rows do not divide by batch.
    """
    check.tensor("unpack_batch", "x", x, "a tensor of shape [B*S, ...]")
    if x.dim() < 1:
        raise ValueError(f"unpack_batch: x must have shape [B*S, ...], got {check.describe(x)}")
    check.host_size("unpack_batch", "batch", batch, least=1)
    rows = x.shape[0]
    if rows % batch != 0:
        raise ValueError(f"unpack_batch: the rows of x must divide by batch = {batch}, got {check.describe(x)}")
    x = x.unflatten(0, (batch, rows // batch))
    return x if batch_first else torch.transpose(x, 0, 1)
