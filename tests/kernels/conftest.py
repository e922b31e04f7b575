"""What tests of kernels share as fixtures."""

import contextlib
import fcntl
import tempfile
from pathlib import Path

import pytest
import torch


@pytest.fixture
def gpu_memory():
    """gpu_memory(gigabytes): skips unless so much is free; large tests of several processes take turns."""
    with contextlib.ExitStack() as stack:

        def take(gigabytes: float) -> None:
            file = stack.enter_context(open(Path(tempfile.gettempdir(), "dsa_ops_large_tests.lock"), "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
            torch.cuda.empty_cache()
            if torch.cuda.mem_get_info()[0] < gigabytes * 1e9:
                pytest.skip(f"needs {gigabytes} GB of free memory on the GPU")

        yield take
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
