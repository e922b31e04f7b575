"""What the files with Triton kernels share: how a launch finds the GPU that its tensors are on."""

import contextlib

import torch
from torch import Tensor

_NOTHING = contextlib.nullcontext()


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device: inside this block it is that of x (CPU tensors: Triton's interpreter)."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(x.device)
