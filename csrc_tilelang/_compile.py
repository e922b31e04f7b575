"""How a kernel file's factory becomes a compiled kernel: once in a process, and once on a machine.

A factory is a function that takes constants (heads, widths, a variant) and returns a TileLang prim_func whose lengths
are run-time arguments:

    @kernel(pass_configs=HAND_MADE)
    def forward(heads, width):
        @T.prim_func
        def forward(...): ...
        return forward

    forward(64, 576)(q, kv, ...)    # compiled at the first call with these constants, then launched

TileLang keeps what it compiled in a folder (TILELANG_CACHE_DIR). Processes that start together, one per GPU, would each
compile the same kernel: a file lock beside that folder lets one compile while the others wait and then load. A folder
that cannot be read or written costs a warning and a compilation in each process, nothing else.
"""

import atexit
import contextlib
import hashlib
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from csrc_tilelang import CompileError


def _folder() -> Path:
    return Path(os.environ.get("TILELANG_CACHE_DIR") or "~/.tilelang/cache").expanduser()


_warned = threading.Event()


def _warn_once(error: Exception) -> None:
    if not _warned.is_set():
        _warned.set()
        warnings.warn(
            f"the folder of compiled kernels, {_folder()}, cannot be used ({error}); every process compiles for itself "
            "until TILELANG_CACHE_DIR names a folder that can be written",
            stacklevel=2,
        )


def _choose_folder() -> None:
    """TileLang makes its folders when it is imported, and where it cannot its import fails: see to it before."""
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        if any(folder.glob("*/*/.staging")):  # filled and read-only: what it holds can be loaded
            return
        _warn_once(error)
    own = tempfile.mkdtemp(prefix="dsa_ops_")
    os.environ["TILELANG_CACHE_DIR"] = own
    atexit.register(_remove, own, os.getpid())


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not at the end of a process forked from this one
        shutil.rmtree(folder, ignore_errors=True)


_choose_folder()
import tilelang  # noqa: E402

# Equal to what "auto" finds on a Hopper GPU, so that a folder filled on a machine without one is good there.
TARGET = {"kind": "cuda", "arch": "sm_90a"}
# For kernels that place their own barriers and test their own ids: TileLang's checks would undo both.
HAND_MADE = {"tl.disable_safe_memory_legalize": True}


_tracing = threading.Lock()  # TileLang reads a factory's program into state of its own


class Kernel:
    """A factory with its compile options. Calling it with constants gives the compiled kernel, ready to launch."""

    def __init__(self, factory: Callable[..., Any], pass_configs: dict[str, Any], tensor_core: str | None):
        self.name = factory.__name__
        self.pass_configs = pass_configs
        self.tensor_core = tensor_core
        self._factory = factory
        self._compiled: dict[tuple, Callable[..., None]] = {}
        self._alive: list[Any] = []  # what the functions above were taken from
        self._compiling: dict[tuple, threading.Lock] = {}  # variants compile side by side
        self.__doc__ = factory.__doc__

    def prim_func(self, *constants: Any) -> Any:
        """What would be compiled, for inspection."""
        return self._factory(*constants)

    def __call__(self, *constants: Any) -> Callable[..., None]:
        found = self._compiled.get(constants)
        return self._first_call(constants) if found is None else found

    def _first_call(self, constants: tuple) -> Callable[..., None]:
        with self._compiling.setdefault(constants, threading.Lock()):
            if constants not in self._compiled:
                with _one_process(f"{self.name}{constants}"):
                    with _tracing:
                        prim_func = self.prim_func(*constants)
                    compiled = _compile(self.name, prim_func, self.pass_configs)
                self._alive.append(compiled)
                self._compiled[constants] = _function(compiled)
            return self._compiled[constants]


def kernel(
    *, pass_configs: dict[str, Any] | None = None, tensor_core: str | None = "HGMMA"
) -> Callable[[Callable[..., Any]], Kernel]:
    """Makes a `Kernel` of a factory.

    Args:
        pass_configs: of TileLang.
        tensor_core: the instruction that its products must become (see tools/lower_check), None if it has none.
    """

    def make(factory: Callable[..., Any]) -> Kernel:
        return Kernel(factory, pass_configs or {}, tensor_core)

    return make


def _function(compiled: Any) -> Callable[..., None]:
    """What a call of `compiled` ends in: the way there looks at every parameter, which takes longer than to launch."""
    try:
        executable = compiled.adapter.get_exportable_executable()
        module = executable.jit() if hasattr(executable, "jit") else executable
        return module.get_function("main")
    except AttributeError:  # a TileLang that keeps it elsewhere
        return compiled


def _compile(name: str, prim_func: Any, pass_configs: dict[str, Any]) -> Any:
    def compile_it() -> Any:
        return tilelang.compile(prim_func, target=TARGET, execution_backend="tvm_ffi", pass_configs=pass_configs)

    try:
        try:
            return compile_it()
        except OSError as error:  # of the folder: what nvcc or TileLang find wrong is no OSError
            _warn_once(error)
        enabled = tilelang.is_cache_enabled()
        tilelang.disable_cache()
        try:
            return compile_it()
        finally:
            if enabled:
                tilelang.enable_cache()
    except Exception as error:  # no nvcc, one that is too old, a TileLang that changed
        what = str(error).strip().splitlines() or [""]
        raise CompileError(f"{name} did not compile: {type(error).__name__}: {what[-1]}") from error


@contextlib.contextmanager
def _one_process(what: str) -> Iterator[None]:
    """Holds the file lock of one kernel; without a lock where the folder or its file system does not give one."""
    with contextlib.ExitStack() as stack:
        try:
            import fcntl

            locks = _folder() / "dsa_ops_locks"
            locks.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(locks / hashlib.sha256(what.encode()).hexdigest()[:16], "w"))
            fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file closes, also when the process dies
        except (ImportError, OSError):
            pass
        yield
