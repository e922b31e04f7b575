"""What every test shares: the seed from the test's own name, and which devices there are to test on."""

import sys
import zlib
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # `import oracle`, `import inputs`, whatever pytest's import mode


def pytest_collection_modifyitems(items):
    found = torch.cuda.device_count()
    for item in items:
        needed = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {found}"))


@pytest.fixture(autouse=True)
def seed(request):
    """Every test starts from random numbers of its own: the same alone, in any order, in any selection."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def poisoned():
    """Memory that torch hands out uninitialised holds NaN, or the largest integer, while this fixture is in use."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
