"""What `import dsa_ops` loads, and which way imports go inside the package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dsa_ops

PACKAGE = Path(dsa_ops.__file__).parent
NOT_LOADED = ("tilelang", "triton", "transformers", "torch.distributed.tensor", "csrc_tilelang")


def in_fresh_process(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_optional_package():
    code = "import sys, torch; before = set(sys.modules); import dsa_ops; print(*sorted(set(sys.modules) - before))"
    loaded = in_fresh_process(code).split()
    assert "dsa_ops.api" in loaded
    assert not [m for m in loaded for no in NOT_LOADED if m == no or m.startswith(no + ".")]


def test_import_works_where_optional_packages_are_missing():
    blocked = "\n".join(f"sys.modules[{name!r}] = None" for name in ("tilelang", "triton", "transformers"))
    code = f"import sys\n{blocked}\nimport torch, dsa_ops\nprint(dsa_ops.warmup(heads=1, index_heads=1, device='cpu'))"
    assert "sparse_mla" in in_fresh_process(code)


@pytest.mark.parametrize(
    ("before", "after"), [("", ""), ("", "importlib.util.find_spec(name)"), ("importlib.import_module(name)", "")]
)
def test_flops_are_counted_whenever_the_counter_is_loaded(before, after):
    """The counter is loaded by whoever counts, before or after us, and may be looked for without being loaded."""
    code = f"""
import importlib.util
import torch
name = "torch.utils.flop_counter"
{before}
import dsa_ops
{after}
with importlib.import_module(name).FlopCounterMode(display=False) as counter:
    dsa_ops.indexer_kl(torch.rand(2, 3), torch.rand(2, 3), torch.zeros(2, 3, dtype=torch.int32))
print(counter.get_total_flops())
"""
    assert in_fresh_process(code).split() == ["36"]


def imports_of(path):
    """Modules of the package that the file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# part of the package: what it may not import
FORBIDDEN = {
    "checks.py": ("dsa_ops.",),
    "dispatch.py": ("dsa_ops.api", "dsa_ops.ops", "dsa_ops.unfused", "dsa_ops.nn"),
    "unfused": ("dsa_ops.api", "dsa_ops.ops", "dsa_ops.dispatch", "dsa_ops.nn", "csrc_tilelang"),
    "ops": ("dsa_ops.api", "dsa_ops.nn", "dsa_ops.layouts", "dsa_ops.losses", "csrc_tilelang"),
    "layouts": ("dsa_ops.api", "dsa_ops.ops", "dsa_ops.unfused", "dsa_ops.dispatch", "dsa_ops.nn", "csrc_tilelang"),
    "nn": ("dsa_ops.ops", "dsa_ops.unfused", "csrc_tilelang"),
    "losses.py": ("dsa_ops.ops", "dsa_ops.unfused", "dsa_ops.nn", "csrc_tilelang"),
}


@pytest.mark.parametrize("part", FORBIDDEN)
def test_imports_go_one_way(part):
    place = PACKAGE / part
    for path in [place] if place.is_file() else place.rglob("*.py"):
        wrong = [m for m in imports_of(path) for no in FORBIDDEN[part] if (m + ".").startswith(no.rstrip(".") + ".")]
        assert not wrong, f"{path.relative_to(PACKAGE)} imports {wrong}"


def test_the_kernels_know_nothing_of_the_package():
    kernels = PACKAGE.parent / "csrc_tilelang"
    for path in kernels.rglob("*.py"):
        assert not [m for m in imports_of(path) if m.startswith("dsa_ops")], path
