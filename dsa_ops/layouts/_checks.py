"""Argument checks of the layout functions: types, ranks, sizes, devices, and values where reading them is free."""

import torch
from torch import Tensor

from dsa_ops.checks import MAX_ROWS, recording

INTS = (torch.int32, torch.int64)


def describe(x: object) -> str:
    """`torch.int32 [5]` for a tensor, the type's name otherwise."""
    if isinstance(x, Tensor) and (x.layout != torch.strided or x.is_nested):
        return f"{x.dtype} that is {'nested' if x.is_nested else x.layout}"
    return f"{x.dtype} {[*x.shape]}" if isinstance(x, Tensor) else type(x).__name__


def tensor(op: str, name: str, x: object, what: str = "a tensor") -> None:
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_nested:
        raise TypeError(f"{op}: {name} must be {what}, got {describe(x)}")


def int_vector(op: str, name: str, x: object, labels: str, size: int | None = None, device: object = None) -> None:
    """An int32 or int64 vector, of the given length and on the given device where these are given."""
    what = f"an int32 or int64 tensor of shape [{labels}]"
    tensor(op, name, x, what)
    assert isinstance(x, Tensor)
    if x.dtype not in INTS:
        raise TypeError(f"{op}: {name} must be {what}, got {describe(x)}")
    if x.dim() != 1 or (size is not None and x.shape[0] != size):
        known = "" if size is None else f" with {labels} = {size}"
        raise ValueError(f"{op}: {name} must be {what}{known}, got {describe(x)}")
    if device is not None and x.device != device:
        raise ValueError(f"{op}: {name} must be on {device}, got {x.device}")


def ids(op: str, name: str, x: object, device: object = None) -> None:
    """An int32 or int64 tensor with at least one dimension, on the given device where one is given."""
    what = "an int32 or int64 tensor of shape [..., K]"
    tensor(op, name, x, what)
    assert isinstance(x, Tensor)
    if x.dtype not in INTS:
        raise TypeError(f"{op}: {name} must be {what}, got {describe(x)}")
    if x.dim() < 1:
        raise ValueError(f"{op}: {name} must be {what}, got {describe(x)}")
    if device is not None and x.device != device:
        raise ValueError(f"{op}: {name} must be on {device}, got {x.device}")


def host_size(op: str, name: str, value: object, least: int = 0) -> None:
    """An int, or a symbolic one while tracing; not a bool, and not a tensor, which would have to be read back."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} must be a host integer, got {describe(value)}")
    if value < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {value}")


def row_count(op: str, name: str, value: int) -> None:
    """Bounds are int32, so no row number may reach 2**31. Not while tracing: it would limit the graph's sizes."""
    if not torch.compiler.is_compiling() and value >= MAX_ROWS:
        raise ValueError(f"{op}: {name} must be below 2**31 (bounds are int32), got {value}")


def last_entry(op: str, name: str, places: Tensor) -> int:
    """Size `name`, which the caller left out, read from the end of the places."""
    if places.is_meta:
        raise ValueError(f"{op}: {name} must be given where cu_seqlens is on meta, got None")
    return int(places[-1])


def readable(x: Tensor, validate: bool) -> bool:
    """Whether values may be read here: always on CPU, on another device only when asked to, never while tracing."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or recording():
        return False
    if type(x) is not Tensor or x.device.type == "meta":
        return False
    return validate or x.device.type == "cpu"
