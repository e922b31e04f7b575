"""The logic of the Triton kernels, without a GPU. What is tested stands in interpreted.py."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

WHERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_in_the_interpreter():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(WHERE / "interpreted.py")],
        cwd=WHERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
