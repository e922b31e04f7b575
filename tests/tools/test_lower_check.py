"""tools/lower_check: what it complains about, what it compiles again, and its errors."""

import importlib
import importlib.util
import json
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL, KERNELS = ROOT / "tools" / "lower_check", ROOT / "csrc_tilelang"
needs_tilelang = pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="needs tilelang")
GOOD = {
    "name": "kernel(64)",
    "registers": 168,
    "spilled": 0,
    "shared": 200_000,
    "static": 0,
    "tensor_core": "HGMMA",
    "warnings": [],
    "counts": {"HGMMA": 8, "QGMMA": 0, "HMMA": 0, "LDGSTS": 4, "UTMALDG": 0, "STL": 0, "LDL": 0, "USETMAXREG": 2},
}


@pytest.fixture(scope="module")
def tool():
    loader = SourceFileLoader("lower_check", str(TOOL))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("lower_check", loader))
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    loader.exec_module(module)
    sys.dont_write_bytecode = writes
    return module


def changed(**counts):
    return {**GOOD, "counts": {**GOOD["counts"], **counts}}


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({**GOOD, "spilled": 24}, "24 bytes of registers spilled"),
        (changed(STL=2), "2 local stores"),
        ({**GOOD, "shared": 232_449}, "232449 bytes of shared memory, 232448 is the limit"),
        ({**GOOD, "shared": 232_000, "static": 1024}, "233024 bytes of shared memory"),
        (changed(HGMMA=0), "no HGMMA instruction"),
        (changed(HMMA=3), "3 HMMA instructions"),
        ({**GOOD, "warnings": ["C7510"]}, "ptxas warns of C7510"),
        ({"name": "kernel(64)", "error": "does not lower: TypeError: no"}, "does not lower: TypeError: no"),
    ],
)
def test_complaints(tool, record, text):
    (complaint,) = tool.complaints(record)
    assert text in complaint


def test_nothing_to_complain_about(tool):
    assert tool.complaints(GOOD) == []
    assert tool.complaints({**changed(HGMMA=0), "tensor_core": None}) == []
    assert tool.complaints({**changed(HMMA=4), "tensor_core": None}) == []


def test_lines_show_what_was_found(tool):
    said = tool.line({**GOOD, "unchanged": True, "seconds": 1.0})
    assert "168" in said and "200000" in said and "8 HGMMA" in said and "unchanged" in said


@needs_tilelang
def test_every_factory_is_compiled(tool):
    from csrc_tilelang._compile import Kernel

    modules = [importlib.import_module(f"csrc_tilelang.{path.stem}") for path in KERNELS.glob("*.py")]
    factories = {id(x): f"{m.__name__}.{n}" for m in modules for n, x in vars(m).items() if isinstance(x, Kernel)}
    compiled = {id(kernel) for m in modules for kernel, _ in getattr(m, "VARIANTS", ())}
    assert factories and not [name for i, name in factories.items() if i not in compiled]
    assert len(tool.variants(tool.kernel_files())) == sum(len(getattr(m, "VARIANTS", ())) for m in modules)


@needs_tilelang
def test_what_has_not_changed_is_not_compiled_again(tool, tmp_path, monkeypatch):
    monkeypatch.setenv("DSA_OPS_LOWER_CHECK_DIR", str(tmp_path))
    sources = []
    monkeypatch.setattr(tool, "programs", lambda: ("nvcc", "cuobjdump"))
    monkeypatch.setattr(tool, "nvcc_version", lambda nvcc: "13.0")
    monkeypatch.setattr(tool, "lower", lambda file, number: (f"{file}[{number}]", f"source {number}", 10, "HGMMA"))
    monkeypatch.setattr(tool, "compile_source", lambda source: sources.append(source) or {"registers": 5})
    first = tool.inspect(("forward", 0, False))
    assert not first["unchanged"] and first["registers"] == 5
    assert tool.inspect(("forward", 0, False))["unchanged"]
    assert not tool.inspect(("forward", 1, False))["unchanged"]
    assert not tool.inspect(("forward", 0, True))["unchanged"]
    assert sources == ["source 0", "source 1", "source 0"]
    monkeypatch.setattr(tool, "nvcc_version", lambda nvcc: "13.1")
    assert not tool.inspect(("forward", 0, False))["unchanged"]


@needs_tilelang
def test_a_source_that_does_not_compile_is_not_remembered(tool, tmp_path, monkeypatch):
    monkeypatch.setenv("DSA_OPS_LOWER_CHECK_DIR", str(tmp_path))
    monkeypatch.setattr(tool, "programs", lambda: ("nvcc", "cuobjdump"))
    monkeypatch.setattr(tool, "nvcc_version", lambda nvcc: "13.0")
    monkeypatch.setattr(tool, "lower", lambda file, number: ("forward", "source", 10, "HGMMA"))
    monkeypatch.setattr(tool, "compile_source", lambda source: {"error": "error: expected a ;"})
    record = tool.inspect(("forward", 0, False))
    assert tool.complaints(record) == ["error: expected a ;"] and not list(tmp_path.iterdir())
    assert json.dumps(record)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["no_such_kernel"], "no kernel file no_such_kernel; there are"), (["--jobs", "0"], "--jobs must be at least 1")],
)
def test_bad_arguments_give_one_line(arguments, text):
    done = subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr
