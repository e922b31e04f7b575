"""The wheel and the sdist hold what they should, and what they hold works away from the checkout."""

import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import setuptools
import torch

import dsa_ops
import dsa_ops.layouts
import dsa_ops.nn

ROOT = Path(__file__).resolve().parent.parent
SMOKE = """
import importlib.util, pathlib, sys, torch
import dsa_ops
site = pathlib.Path(sys.argv[1])
for name in ("dsa_ops", "csrc_tilelang"):
    assert site in pathlib.Path(importlib.util.find_spec(name).origin).parents, (name, site)
x = torch.randn(4, 2, 8)
indices, scores = dsa_ops.indexer_topk(x, x[:, 0], x[:, :, 0], topk=2)
print(dsa_ops.sparse_mla(x, x[:, 0], indices).out.shape)
"""


def call(*command, cwd, **kwargs):
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Folder with a wheel and an sdist, built from a copy so that no build leftover gets in or stays behind."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    kept = [
        "pyproject.toml",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "dsa_ops",
        "csrc_tilelang",
        "tests",
        "tools",
        "docs",
    ]
    source.mkdir()
    for name in kept:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(path, source / name)
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "out", cwd=source)
    return folder / "out"


@pytest.fixture(scope="module")
def wheel(dist):
    return next(dist.glob("*.whl"))


@pytest.fixture(scope="module")
def sdist(dist):
    return next(dist.glob("*.tar.gz"))


def modules():
    """Every file of the two packages, relative to the root."""
    files = [path for package in ("dsa_ops", "csrc_tilelang") for path in (ROOT / package).rglob("*")]
    return {str(path.relative_to(ROOT)) for path in files if path.suffix == ".py" or path.name == "py.typed"}


def test_wheel_holds_the_packages_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert "dsa_ops/py.typed" in names
    assert names == modules()


def test_wheel_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = archive.read(name).decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert required == ["Requires-Dist: torch>=2.9"], "a plain install asks for torch alone, as a range"
    extras = re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE)
    assert {"tilelang", "triton", "demo", "transformers", "dev"} <= set(extras)
    assert f"Version: {dsa_ops.__version__}" in metadata.splitlines()
    assert "License-Expression: Apache-2.0" in metadata


def test_sdist_holds_what_its_tests_need(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert modules() <= names
    tests = {str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("*") if p.suffix in (".py", ".pt2")}
    assert tests <= names
    assert {"LICENSE", "README.md", "tools/test", "tools/constraints.txt", "docs/contract.md"} <= names
    assert not [name for name in names if name.endswith(".pyc") or name.startswith((".", "build/"))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_installs_into_a_new_environment_and_runs_there(kind, request, tmp_path):
    """The torch of the environment that runs the test is lent: a .pth file adds a folder, not its .pth files."""
    environment = tmp_path / "environment"
    call(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(call(python, "-c", purelib, cwd=tmp_path).strip())
    (site / "lent.pth").write_text(f"{Path(torch.__file__).parent.parent}\n{Path(setuptools.__file__).parent.parent}\n")
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--ignore-installed", "--no-deps")
    call(*pip, "--no-build-isolation", request.getfixturevalue(kind), cwd=tmp_path, env=outside)
    assert "torch.Size([4, 2, 8])" in call(python, "-c", SMOKE, site, cwd=tmp_path, env=outside)


@pytest.mark.parametrize("module", [dsa_ops, dsa_ops.layouts, dsa_ops.nn], ids=lambda module: module.__name__)
def test_what_users_call_is_documented_and_annotated(module):
    for name in module.__all__:
        thing = getattr(module, name)
        assert inspect.getdoc(thing), f"{name} has no docstring"
        if inspect.isfunction(thing):
            signature = inspect.signature(thing)
            bare = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
            assert not bare and signature.return_annotation is not signature.empty, f"{name}: {bare or 'return'}"
