"""What every op file repeats: custom op, fake, autocast rule, vmap rule, FLOP formula, errors of higher-order AD.

An op is a schema, a check function, an unfused implementation and a function for the shapes of its results. The body
that PyTorch calls is the same on every device: check, validate ids, then `dispatch.run`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsa_ops import checks, dispatch
from dsa_ops.ops._flops import register_flops

CAST_FROM = (torch.bfloat16, torch.float16, torch.float32)  # float64 stays, the op refuses what is no float
LIBRARY = torch.library.Library("dsa", "FRAGMENT")  # registrations die with this object
AUTOCAST: dict[str, tuple[int, ...]] = {}  # of every op, the positions of the arguments that autocast casts


def register_op(
    name: str,
    schema: str,
    *,
    check: Callable[..., None],
    outputs: Callable[..., Any],
    unfused: Callable[..., Any],
    flops: Callable[..., int],
    validate: Callable[..., None] | None = None,
    autocast: Sequence[int] = (),
) -> torch.library.CustomOpDef:
    """Register dsa::<name>.

    Args:
        schema: one line, SymInt for every size.
        check: raises on ranks, sizes, dtypes, devices; called by body and fake.
        outputs: contiguous empty results for given arguments; the fake.
        unfused: the implementation that serves every device and dtype.
        flops: arguments with shapes in place of tensors -> floating point operations.
        validate: raises on values, called by the body only.
        autocast: positions of the arguments that autocast casts to its dtype.
    """
    dispatch.KERNELS.setdefault(name, ())
    AUTOCAST[name] = tuple(autocast)

    def body(*args):
        args += defaults[len(args) :]  # the dispatcher drops trailing arguments equal to their default
        try:
            check(*args)
            if forward_ad._current_level >= 0:  # tangents are out of sight here and would be dropped without a word
                raise RuntimeError(
                    f"dsa::{name} has no forward-mode derivative: it cannot run inside torch.func.jvp or a dual level"
                )
            if validate is not None:
                validate(*args)
            on_cuda = args[always_given].is_cuda
            device = "cuda" if on_cuda else "cpu" if args[always_given].is_cpu else args[always_given].device.type
            if not torch.is_autocast_enabled(device):
                return dispatch.run(name, unfused, args, on_cuda)
            with torch.autocast(device, enabled=False):  # on in an eager body, off when a compiled graph runs it
                return dispatch.run(name, unfused, args, on_cuda)
        except (AttributeError, RuntimeError, TypeError) as error:  # of what is no strided tensor, somewhere below
            checks.refuse_kinds(name, arguments, args, error)
            raise

    def fake(*args):
        args += defaults[len(args) :]
        checks.refuse_kinds(name, arguments, args)
        check(*args)
        return outputs(*args)

    op = torch.library.custom_op(f"dsa::{name}", body, mutates_args=(), schema=schema)
    overload = getattr(torch.ops.dsa, name).default
    arguments = overload._schema.arguments
    always_given = next(i for i, a in enumerate(arguments) if str(a.type) == "Tensor")  # an optional one may be None
    defaults = tuple(a.default_value if a.has_default_value() else None for a in arguments)

    op.register_fake(fake)
    op.register_vmap(functools.partial(_vmap, overload))
    register_flops(
        getattr(torch.ops.dsa, name),
        lambda *args, out_shape=None, **kwargs: flops(*args, *defaults[len(args) :]),
    )
    if autocast:
        for device in ("cpu", "cuda"):
            LIBRARY.impl(name, functools.partial(_autocast, overload, device), "Autocast" + device.upper())
    return op


def no_second_derivative(op: torch.library.CustomOpDef, *names: str) -> None:
    """Differentiating the backward op of these ops raises, where the default would drop the gradient."""

    def refuse(ctx, *grads):
        raise RuntimeError(f"{' and '.join(f'dsa::{name}' for name in names)}: there is no second derivative")

    op.register_autograd(refuse)


def _autocast(overload, device: str, *args):
    args = autocast_arguments(overload._opname, device, args)
    with torch.autocast(device, enabled=False):
        return overload(*args)


def autocast_arguments(name: str, device: str, args: tuple) -> tuple:
    """The arguments of dsa::<name> as autocast on this device hands them on."""
    dtype, cast = torch.get_autocast_dtype(device), AUTOCAST[name]
    return tuple(a.to(dtype) if i in cast and getattr(a, "dtype", None) in CAST_FROM else a for i, a in enumerate(args))


def _vmap(overload, info, in_dims, *args):
    """One call per sample: rows of different samples select from different keys, there is nothing to batch."""
    if info.batch_size == 0:
        raise ValueError(f"{overload.name()}: vmap over a dimension of size 0 is not supported")
    samples = [
        overload(*(a if dim is None else a.select(dim, i) for a, dim in zip(args, in_dims, strict=False)))
        for i in range(info.batch_size)
    ]
    if isinstance(samples[0], Tensor):
        return torch.stack(samples), 0
    return tuple(torch.stack(s) for s in zip(*samples, strict=True)), (0,) * len(samples[0])
