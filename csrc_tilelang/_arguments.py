"""What every kernel asks of its arguments, and how a launch brings them into the form a kernel reads."""

import math
import os

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: the width of the copies
MIB = 1 << 20


def not_bfloat16(**tensors: Tensor) -> str | None:
    """A refusal for the first tensor of another dtype."""
    for name, x in tensors.items():
        if x.dtype != torch.bfloat16:
            return f"{name} is {str(x.dtype).removeprefix('torch.')}, the kernel takes bfloat16"
    return None


def not_among(name: str, value: object, served: tuple) -> str | None:
    """A refusal where a width or a number of heads is none that the kernel is written for."""
    if value in served:
        return None
    return f"{name} is {value}, the kernel takes {' or '.join(map(str, served))}"


def dense(x: Tensor) -> Tensor:
    """x, or a copy where it is not contiguous or does not begin at a multiple of 16 bytes."""
    if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def workspace_bytes() -> int:
    """Extra memory that one call may use: DSA_OPS_WORKSPACE_MB (MiB), 1 GiB by default."""
    text = os.environ.get("DSA_OPS_WORKSPACE_MB")
    if not text:
        return 1024 * MIB
    try:
        megabytes = float(text)
    except ValueError:
        megabytes = math.nan
    if not 0 < megabytes < math.inf:
        raise ValueError(f"DSA_OPS_WORKSPACE_MB must be a positive number of MiB, got {text!r}")
    return int(megabytes * MIB)
