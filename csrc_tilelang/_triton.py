"""How a Triton kernel is compiled once in a process, and launched through the handle of what was compiled.

    _kernel = Variants(_function, torch.float32, torch.int32, 1)     # dtypes of its tensors, 1 for an integer
    _kernel(4, 2048, warps=4)[rows, 1, 1](x, ids, length, 4, 2048)    # constants of the variant; then all arguments

Triton's own way, `_function[grid](...)`, looks at every argument of every call; the handle knows them already. So
tensors must be what the variant was compiled for: of these dtypes and, unless the function declines it, aligned to 16
bytes. Integers must be declared with do_not_specialize, or the values 1 and multiples of 16 would be compiled apart.

Triton keeps what it compiled in a folder (TRITON_CACHE_DIR) that processes share safely. A folder that cannot be
written costs a warning, and a compilation in each process.
"""

import tempfile
import threading
import warnings
from typing import Any

import torch
import triton

from csrc_tilelang import CompileError

INTERPRETED = triton.knobs.runtime.interpret  # reading it asks the environment
_warned = threading.Event()


class Variants:
    """A Triton function with what is common to all its variants."""

    def __init__(self, function: Any, *arguments: Any):
        self.function = function
        self._arguments = arguments
        self._compiled: dict[tuple, Any] = {}
        self._compiling = threading.Lock()

    def __call__(self, *constants: Any, warps: int) -> Any:
        """The variant for the current device: takes a grid of three, then the arguments."""
        if INTERPRETED:
            return self.function
        key = torch.cuda.current_device(), constants, warps
        found = self._compiled.get(key)
        return self._first_call(key) if found is None else found

    def _first_call(self, key: tuple) -> Any:
        with self._compiling:
            if key not in self._compiled:
                try:
                    self._compiled[key] = self._compile(key)
                except Exception as error:  # of Triton, of ptxas, of the C compiler that Triton asks for
                    raise CompileError(f"{self.function.__name__}: {type(error).__name__}: {error}") from error
            return self._compiled[key]

    def _compile(self, key: tuple) -> Any:
        def compile_it() -> Any:
            _, constants, warps = key
            compiled = self.function.warmup(*self._arguments, *constants, num_warps=warps, grid=(1, 1, 1))
            assert compiled.run is not None  # loads it onto the device
            return compiled

        try:
            return compile_it()
        except OSError as error:
            if not _warned.is_set():
                _warned.set()
                warnings.warn(
                    f"Triton's folder of compiled kernels, {triton.knobs.cache.dir}, cannot be used ({error}); every "
                    "process compiles for itself until TRITON_CACHE_DIR names a folder that can be written",
                    stacklevel=2,
                )
        with tempfile.TemporaryDirectory(prefix="dsa_ops_") as folder, triton.knobs.cache.scope():
            triton.knobs.cache.dir = folder
            return compile_it()
