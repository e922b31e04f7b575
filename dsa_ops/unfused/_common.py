"""Shared by the unfused implementations: the memory budget, products with wide accumulation, and the gather of slots.

T query rows, S keys, H heads, D width, K slots, C rows of one chunk.
"""

import math
import os
from collections.abc import Iterator

import torch
from torch import Tensor

MIB = 1 << 20
CACHE_BYTES = 8 * MIB  # on CPU a chunk that stays in cache is faster than one that fills the budget


def workspace_bytes(device: torch.device) -> int:
    """Extra memory one call may use: DSA_OPS_WORKSPACE_MB (MiB), default 256 on CPU and 1024 elsewhere."""
    text = os.environ.get("DSA_OPS_WORKSPACE_MB")
    if not text:
        return (256 if device.type == "cpu" else 1024) * MIB
    try:
        megabytes = float(text)
    except ValueError:
        megabytes = math.nan
    if not 0 < megabytes < math.inf:
        raise ValueError(f"DSA_OPS_WORKSPACE_MB must be a positive number of MiB, got {text!r}")
    return int(megabytes * MIB)


def row_chunks(rows: int, bytes_per_row: int, device: torch.device) -> Iterator[slice]:
    """Slices of rows whose temporaries fit the budget, at least one row each."""
    budget = workspace_bytes(device)
    if device.type == "cpu":
        budget = min(budget, CACHE_BYTES)
    step = max(1, budget // max(1, bytes_per_row))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def bmm_wide(a: Tensor, b: Tensor) -> Tensor:
    """Batched product of same-dtype operands, accumulated and returned in float32 (float64 for float64)."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.bmm(a, b)
    if a.device.type == "cuda":  # tensor cores, float32 out
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def operand_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which products are fed: half precision only where the device multiplies it natively."""
    if dtype in (torch.float32, torch.float64) or device.type == "cuda":
        return dtype
    return torch.float32


class Slots:
    """Which key every slot of some rows stands for.

    Empty slots (id < 0, id >= S, at or past topk_length) must have no effect, not even a NaN in the key they would read.
    So they read a key that their own row sees anyway (`read`), their logits are masked, and what they would scatter goes to
    a spare row S (`write`). Rows without any valid slot read row 0 and their results are replaced.
    """

    def __init__(self, indices: Tensor, num_keys: int, topk_length: Tensor | None):
        valid = (indices >= 0) & (indices < num_keys)
        if topk_length is not None:
            slots = torch.arange(indices.shape[1], device=indices.device)
            valid &= slots < topk_length[:, None]
        seen = torch.where(valid, indices, -1).amax(-1, keepdim=True)
        self.valid = valid  # [C, K]
        self.empty_rows = seen[:, 0] < 0  # [C]
        self._indices = indices
        self._seen = seen.clamp_(min=0)
        self._num_keys = num_keys

    def gather(self, keys: Tensor) -> Tensor:
        """[C, K, D]: the key of every slot."""
        read = torch.where(self.valid, self._indices, self._seen)
        return keys.index_select(0, read.flatten()).view(*read.shape, keys.shape[1])

    def scatter_add(self, into: Tensor, values: Tensor) -> None:
        """into[id] += values for every valid slot; `into` has a spare row at S."""
        write = torch.where(self.valid, self._indices, self._num_keys)
        add_rows(into, write.flatten(), values.flatten(0, 1))


def add_rows(into: Tensor, rows: Tensor, values: Tensor) -> None:
    """into[rows[i]] += values[i]; on CPU in the order of i, on CUDA reproducible only in deterministic mode."""
    into.index_add_(0, rows, values)
