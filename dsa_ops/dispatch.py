"""Which implementation runs a call: the one place that decides.

For every op there is a table of fused kernels. A call walks its op's kernels in order; each says yes, or no with a
reason in words. The first yes runs, otherwise the unfused implementation. Decisions read shapes, dtypes, strides,
addresses, device and capability only: no host sync, nothing data-dependent.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BACKENDS = ("auto", "tilelang", "unfused")


@dataclass(frozen=True, eq=False)  # equal to itself alone: it is looked up in every call
class Kernel:
    """One row of the table: a kernel file in csrc_tilelang that can serve an op.

    The module offers `refuse(*args) -> str | None` (the reason in words, None for yes), `launch(*args)` and
    `compile_for(**widths)` for `warmup`. It is imported only when everything before it has said yes. `needs` is the
    package it is written in.
    """

    name: str
    module: str
    needs: str = "tilelang"


def _row(name: str, needs: str = "tilelang") -> tuple[Kernel, ...]:
    return (Kernel(name, f"csrc_tilelang.{name}", needs),)


# op name -> kernels in the order in which they are asked
KERNELS: dict[str, tuple[Kernel, ...]] = {
    "indexer_topk": _row("indexer_topk"),
    "indexer_scores": _row("indexer_scores"),
    "indexer_scores_backward": _row("indexer_scores_backward"),
    "sparse_mla": _row("sparse_mla_forward"),
    "sparse_mla_backward": _row("sparse_mla_backward"),
    "attention_target": _row("attention_target"),
    "indexer_kl": _row("indexer_kl", needs="triton"),
    "indexer_kl_backward": _row("indexer_kl_backward", needs="triton"),
    "dense_indexer_kl": _row("dense_indexer_kl"),
    "dense_indexer_kl_backward": _row("dense_indexer_kl_backward"),
}
CAPABILITY = (9, 0)  # what the kernels are built for: H100, H200
COMPILES_AT_ONCE = 8


@dataclass(frozen=True)
class Explanation:
    """What `dispatch` would do with a call: the backend, the kernel (None when unfused), and why each other said no.

    `backend` is "none" where a forced backend cannot serve the call, which then raises.
    """

    op: str
    backend: str
    kernel: str | None
    refusals: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        what = "raises: the forced backend cannot serve it" if self.backend == "none" else None
        lines = [f"dsa::{self.op} {what or f'runs {self.kernel or self.backend}'}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.refusals.items()]
        return "\n".join(lines)


_forced: tuple[list[str], ...] = ()  # the `backend` blocks that are open, each an object of its own; replaced whole
_forcing = threading.Lock()
_warned: set[tuple[str, str]] = set()


def requested_backend() -> str:
    """The backend in force: the innermost `backend(...)`, else DSA_OPS_BACKEND, else "auto"."""
    blocks = _forced  # once: another thread may close its block here
    if blocks:
        return blocks[-1][0]
    name = os.environ.get("DSA_OPS_BACKEND") or "auto"
    if name not in BACKENDS:
        raise ValueError(f"DSA_OPS_BACKEND must be one of {', '.join(BACKENDS)}, got {name!r}")
    return name


def _refuse_compiled() -> None:
    if torch.compiler.is_compiling():
        raise RuntimeError("dsa_ops.backend cannot be used inside a compiled function; put it around the call")


class _Force(contextlib.AbstractContextManager[None]):
    """The block of `backend`. It may be entered again, also inside itself and by several threads."""

    def __init__(self, name: str):
        self._name = name
        self._entered: list[list[str]] = []

    def __call__(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def forced(*args: Any, **kwargs: Any) -> Any:
            _refuse_compiled()  # before the `with`, for which torch.compile has an error of its own
            with self:
                return function(*args, **kwargs)

        return forced

    def __enter__(self) -> None:
        global _forced
        _refuse_compiled()
        block = [self._name]
        with _forcing:
            _forced = (*_forced, block)
        self._entered.append(block)

    def __exit__(self, *_: object) -> None:
        global _forced
        block = self._entered.pop()
        with _forcing:  # blocks of several threads may close in any order
            _forced = tuple(other for other in _forced if other is not block)


def backend(name: str) -> _Force:
    """Force a backend inside a `with` block: "auto", "tilelang" or "unfused".

    Process-wide, and read when an op runs: forward and backward each for itself. A forced backend that cannot serve a
    call raises RuntimeError with the reason. Inside a compiled function it raises RuntimeError, since the graph would
    not keep it: put the `with` around the call of the compiled function. It may be kept and entered again, and serve as
    a decorator.
    """
    _refuse_compiled()
    if name not in BACKENDS:
        raise ValueError(f"backend: name must be one of {', '.join(BACKENDS)}, got {name!r}")
    return _Force(name)


@functools.cache
def _missing(package: str) -> str | None:
    if importlib.util.find_spec(package):
        return None
    return f"{package} is not installed (pip install dsa-ops[{package}])"


@functools.cache
def _kernel_module(kernel: Kernel) -> Any:
    """The kernel's module, or the reason why it cannot be imported."""
    if missing := _missing(kernel.needs):
        return missing
    try:
        return importlib.import_module(kernel.module)
    except Exception as error:  # a broken tilelang fails in many ways, each of them is a reason, not a crash
        return f"{kernel.module} cannot be imported: {type(error).__name__}: {error}"


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _backend_refusal(op: str, device: torch.device) -> str | None:
    """Why no fused kernel at all can serve a call on this device."""
    if device.type != "cuda":
        return f"the tensors are on {device.type}, fused kernels run on CUDA"
    capability = _capability(device)
    if capability != CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, fused kernels are built for 9.0"
    if not KERNELS.get(op):
        return f"this version has no fused kernel for {op}"
    return None


_broken: dict[Kernel, str] = {}  # kernels that did not compile here, and why; not tried again in this process


def _device(args: tuple) -> torch.device:
    for x in args:
        if isinstance(x, Tensor):
            return x.device
    raise TypeError("no tensor among the arguments")  # every op has one


def choose(op: str, args: tuple) -> tuple[Kernel | None, Callable | None, dict[str, str]]:
    """The kernel that serves the call and its launcher, None for unfused; and every refusal with its reason."""
    device = _device(args)
    if reason := _backend_refusal(op, device):
        return None, None, {"tilelang": reason}
    refusals: dict[str, str] = {}
    for kernel in KERNELS[op]:
        module = _kernel_module(kernel)
        reason = module if isinstance(module, str) else _broken.get(kernel) or module.refuse(*args)
        if reason is None:
            return kernel, module.launch, refusals
        refusals[kernel.name] = reason
    return None, None, refusals


def run(op: str, unfused: Callable, args: tuple, on_cuda: bool) -> Any:
    """Run one op's call on the backend that serves it."""
    requested = requested_backend()
    if requested == "unfused" or (requested == "auto" and not on_cuda):
        return unfused(*args)
    kernel, launch, refusals = choose(op, args)
    while kernel is not None and launch is not None:
        try:
            return _launch(launch, args)
        except RuntimeError as error:
            if not _is_compile_error(error):
                raise
            _broken[kernel] = str(error)
            kernel, launch, refusals = choose(op, args)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    if requested != "auto":
        raise RuntimeError(f"dsa::{op}: backend {requested!r} was asked for and cannot serve this call: {reasons}")
    _warn_once(op, reasons)
    return unfused(*args)


def _launch(launch: Callable, args: tuple) -> Any:
    device = _device(args)
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return launch(*args)
    with torch.cuda.device(device):  # for its current stream, and for what the launch allocates
        return launch(*args)


def _is_compile_error(error: Exception) -> bool:
    from csrc_tilelang import CompileError  # not at the top: `import dsa_ops` loads no kernel package

    return isinstance(error, CompileError)


def _warn_once(op: str, reasons: str) -> None:
    if (op, reasons) not in _warned:
        _warned.add((op, reasons))
        warnings.warn(f"dsa::{op} runs unfused on CUDA: {reasons}", stacklevel=3)


def explain_op(op: str, args: tuple) -> Explanation:
    """`Explanation` for a call of torch.ops.dsa.<op> with these arguments."""
    requested = requested_backend()
    if requested == "unfused":
        return Explanation(op, "unfused", None, {"tilelang": "the unfused backend is forced"})
    kernel, _, refusals = choose(op, args)
    if kernel is None:
        return Explanation(op, "unfused" if requested == "auto" else "none", None, refusals)
    return Explanation(op, "tilelang", kernel.name, refusals)


def warmup(
    *,
    heads: int,
    index_heads: int,
    head_dim: int = 576,
    v_dim: int = 512,
    index_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> dict[str, str]:
    """Compile the fused kernels that a model needs before its first step.

    Args:
        heads: attention heads on this rank (H).
        index_heads: indexer heads (Hi).
        head_dim, v_dim: widths of the absorbed query/key and of the value (D, Dv).
        index_dim: indexer head width (Di).
        dtype: dtype of the queries and keys.
        device: CUDA device to compile for; default the current one, "cpu" where there is none.

    Returns:
        For each op "compiled", or the reason why it has no kernel here and will run unfused. Kernels compile side by
        side, each once on a machine: processes that warm up together wait for one another.
    """
    for name, value in dict(
        heads=heads, index_heads=index_heads, head_dim=head_dim, v_dim=v_dim, index_dim=index_dim
    ).items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"warmup: {name} must be an int, got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"warmup: {name} must be at least 1, got {value}")
    if v_dim > head_dim:
        raise ValueError(f"warmup: v_dim must be at most head_dim = {head_dim}, got {v_dim}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"warmup: dtype must be a floating-point torch.dtype, got {dtype!r}")
    try:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"warmup: device must be a torch.device or the name of one, got {device!r}") from error
    widths = dict(heads=heads, index_heads=index_heads, head_dim=head_dim, v_dim=v_dim, index_dim=index_dim)

    def compile_op(op: str) -> str:
        if reason := _backend_refusal(op, device):
            return reason
        reasons = []
        for kernel in KERNELS[op]:
            module = _kernel_module(kernel)
            try:
                reason = module if isinstance(module, str) else module.compile_for(**widths, dtype=dtype, device=device)
            except RuntimeError as error:
                if not _is_compile_error(error):
                    raise
                reason = str(error)
            if reason is None:
                return "compiled"
            reasons.append(f"{kernel.name}: {reason}")
        return "; ".join(reasons)

    with ThreadPoolExecutor(COMPILES_AT_ONCE) as pool:  # the time goes into compilers that run as their own processes
        return dict(zip(KERNELS, pool.map(compile_op, KERNELS), strict=True))
