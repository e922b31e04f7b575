"""What every kernel asks of its arguments, and how a launch brings them into the form a kernel reads."""

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: the width of the copies


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
