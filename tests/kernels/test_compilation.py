"""Kernels compile once in a process and once on a machine, and a folder that cannot be used costs a warning."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="needs tilelang"),
]

# A kernel of a few lines, and a copy of nvcc that writes down each time it is used.
SCRIPT = """
import os, sys, warnings
import tilelang.language as T
from csrc_tilelang import CompileError
from csrc_tilelang._compile import kernel

@kernel(tensor_core=None)
def double(width):
    rows = T.dynamic("rows")
    @T.prim_func
    def double(x: T.Tensor((rows, width), "float32"), y: T.Tensor((rows, width), "float32")):
        with T.Kernel(rows, threads=32) as t:
            for i in T.Parallel(width):
                y[t, i] = x[t, i] * 2.0
    return double
"""


@pytest.fixture
def toolkit(tmp_path):
    """A CUDA_HOME whose nvcc counts its uses in `uses`."""
    found = subprocess.run(["bash", "-c", "command -v nvcc"], capture_output=True, text=True).stdout.strip()
    if not found:
        pytest.skip("needs nvcc")
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    uses = tmp_path / "uses"
    uses.touch()
    # a version or a list of flags asked for is not a compilation
    nvcc.write_text(f'#!/bin/sh\ncase "$*" in *.cu*) echo use >> {uses};; esac\nexec {found} "$@"\n')
    nvcc.chmod(0o755)
    return nvcc.parents[1], uses


def run(code, tmp_path, toolkit, folder="cache"):
    script = tmp_path / "script.py"  # TileLang reads the source of what it compiles
    script.write_text(
        "import warnings\nwith warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n    from csrc_tilelang import _compile\n" + SCRIPT + code
    )
    environment = {
        **os.environ,
        "CUDA_HOME": str(toolkit),
        "PYTHONPATH": str(ROOT),
        "TILELANG_CACHE_DIR": str(tmp_path / folder),
        "TILELANG_PRINT_ON_COMPILATION": "0",
    }
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_compiles_once_whatever_the_process(tmp_path, toolkit):
    home, uses = toolkit
    code = """
first = double(64)
assert double(64) is first
pids = []
for _ in range(8):  # as the ranks of a machine: all at once, none of them has compiled this one
    pid = os.fork()
    if pid == 0:
        try:
            double(96)
        except BaseException as error:
            print(error, flush=True)
            os._exit(1)
        os._exit(0)
    pids.append(pid)
assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 8
"""
    run(code, tmp_path, home)
    assert len(uses.read_text().split()) == 2

    for library in (tmp_path / "cache").rglob("executable.so"):  # broken off while it was written
        library.write_bytes(library.read_bytes()[:100])
    run("double(64)", tmp_path, home)
    entries = list((tmp_path / "cache").rglob("executable.so"))
    assert sum(entry.stat().st_size > 100 for entry in entries) == 1, "the broken entry was not made again"


def test_a_folder_that_cannot_be_made_costs_one_warning(tmp_path, toolkit):
    home, _ = toolkit
    (tmp_path / "cache").write_text("a file stands where the folder should be")
    code = """
with warnings.catch_warnings(record=True) as later:
    warnings.simplefilter("always")
    double(64), double(32)
print(len([w for w in caught + later if "the folder of compiled kernels" in str(w.message)]))
"""
    assert run(code, tmp_path, home).split() == ["1"]


def test_a_folder_that_cannot_be_written_is_read_and_costs_one_warning(tmp_path, toolkit):
    home, _ = toolkit
    # the same for a user who may write anywhere: what is made in the folder fails
    code = """
import tilelang.cache.kernel_cache as kernel_cache
first = double(64)
def refuse(*args, **kwargs):
    raise PermissionError(13, "Permission denied")
kernel_cache.KernelCache._save_kernel_to_disk = refuse
for cache in (kernel_cache.KernelCache, *kernel_cache.KernelCache.__subclasses__()):
    if cache._instance is not None:  # as in a new process
        cache._instance._memory_cache.clear()
double._compiled.clear()
assert first is not double._alive[0]  # launched without TileLang's own look at every argument
assert _compile._function(double) is double  # a TileLang that keeps the function elsewhere
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert double(64) is not first
    assert not caught
    double(32)
print(len(caught), str(caught[0].message))
"""
    said = run(code, tmp_path, home)
    assert said.startswith("1 ") and "Permission denied" in said


def test_without_a_compiler_the_error_is_one_that_dispatch_takes_for_a_refusal(tmp_path, toolkit):
    code = """
try:
    double(64)
except CompileError as error:
    print(error)
"""
    said = run(code, tmp_path, tmp_path / "nothing_here")
    assert said.startswith("double did not compile: ") and "nvcc" in said
