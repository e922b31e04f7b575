"""The clock, the memory, and what the machine can do at best."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

L2_BYTES = 256 << 20  # overwritten before each timed call, several times any L2
HEAD_START = 1_000_000  # GPU cycles, about half a millisecond: the host has queued a short call before its time begins
GEMM_SIZES = (4096, 8192)
PROBE_KEYS = 8192  # rows that are gathered and added to: they fit L2, so this is the best that either can do
PROBE_ROWS = 4096
PROBE_IDS = 2048
CEILINGS = {
    "gemm": "bf16 products of square matrices, the best of two sizes and two layouts",
    "copy": "1 GiB from memory to memory, bytes read and written",
    "gather": "random 1152-byte rows out of 8192",
    "reduction": "fp32 additions into random 2304-byte rows out of 8192",
}
UNITS = {"gemm": "TFLOP/s", "copy": "TB/s", "gather": "TB/s", "reduction": "TB/s"}


@dataclass(frozen=True)
class Timing:
    """Of one call. On CUDA by events on the stream, on a CPU by the host's clock."""

    ms: float  # median
    ms_min: float
    ms_max: float
    repeats: int
    host_ms: float  # until the call has returned, the device still at work
    first_ms: float  # the first call, compilation included
    extra_bytes: int | None  # beside inputs and results, at the peak; None on a CPU
    result_bytes: int


def tensors(result: Any) -> list[Tensor]:
    """Those in nested tuples, lists and dicts."""
    if isinstance(result, Tensor):
        return [result]
    parts = result.values() if isinstance(result, dict) else result if isinstance(result, (tuple, list)) else ()
    return [x for part in parts for x in tensors(part)]


def result_bytes(result: Any) -> int:
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors(result)}
    return sum(storages.values())


class Clock:
    """Times calls, `repeats` times each but for no longer than about `seconds`."""

    def __init__(self, device: torch.device, repeats: int, seconds: float):
        self.device, self.repeats, self.seconds = device, repeats, seconds
        self.cuda = device.type == "cuda"
        self.flush = torch.empty(L2_BYTES, dtype=torch.uint8, device=device) if self.cuda else None

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def _once(self, call: Callable[[], Any]) -> tuple[float, float]:
        """(device ms, host ms) of a call with a cold L2."""
        if not self.cuda:
            start = time.perf_counter()
            call()
            ms = (time.perf_counter() - start) * 1e3
            return ms, ms
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START)
        self.flush.zero_()
        begin.record()
        start = time.perf_counter()
        call()
        host = time.perf_counter() - start
        end.record()
        end.synchronize()
        return begin.elapsed_time(end), host * 1e3

    def measure(self, call: Callable[[], Any], look: Callable[[Any], None] | None = None) -> Timing:
        """Two calls ahead: `look` sees the first one's result, the second shows the memory and, if slow, the time."""
        self._wait()
        start = time.perf_counter()
        result = call()
        self._wait()
        first = time.perf_counter() - start
        if look is not None:
            look(result)
        del result
        extra = None
        if self.cuda:
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        start = time.perf_counter()
        result = call()
        self._wait()
        second = time.perf_counter() - start
        size = result_bytes(result)
        if self.cuda:
            extra = max(torch.cuda.max_memory_allocated(self.device) - before - size, 0)
        del result
        if second > self.seconds:
            times = [(second * 1e3, second * 1e3)]
        else:
            times = [self._once(call)]
            repeats = int(min(self.repeats, max(1, self.seconds * 1e3 / max(times[0][0], 1e-3))))
            times += [self._once(call) for _ in range(repeats - 1)]
        ms, host = zip(*times, strict=True)
        return Timing(
            statistics.median(ms),
            min(ms),
            max(ms),
            len(ms),
            statistics.median(host),
            first * 1e3,
            extra,
            size,
        )


def _product(clock: Clock, size: int, transposed: bool) -> float:
    a, b = (torch.randn(size, size, device=clock.device, dtype=torch.bfloat16) for _ in range(2))
    b, product = b.T if transposed else b, torch.empty_like(a)
    return 2 * size**3 / clock.measure(lambda: torch.mm(a, b, out=product)).ms * 1e3


def _gemm(clock: Clock) -> float:
    return max(_product(clock, size, transposed) for size in GEMM_SIZES for transposed in (False, True))


def _copy(clock: Clock) -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / clock.measure(lambda: target.copy_(source)).ms * 1e3


def _random_rows(clock: Clock) -> Tensor:
    return torch.randint(PROBE_KEYS, (PROBE_ROWS, PROBE_IDS), device=clock.device, dtype=torch.int32)


def _gather(clock: Clock) -> float:
    from . import probes

    ids, run = _random_rows(clock), probes.gather[(PROBE_ROWS,)]
    keys = torch.zeros(PROBE_KEYS, 288, device=clock.device, dtype=torch.int32)
    out = torch.empty(PROBE_ROWS, 288, device=clock.device, dtype=torch.int32)

    def ms(step: int, warps: int) -> float:
        return clock.measure(lambda: run(keys, ids, out, PROBE_IDS, step, num_warps=warps)).ms

    return ids.numel() * 1152 / min(ms(*how) for how in probes.GATHERS) * 1e3


def _reduction(clock: Clock) -> float:
    from . import probes

    ids, run = _random_rows(clock), probes.reduce[(PROBE_ROWS,)]
    keys = torch.zeros(PROBE_KEYS, 576, device=clock.device)

    def ms(step: int, warps: int) -> float:
        return clock.measure(lambda: run(keys, ids, PROBE_IDS, step, num_warps=warps)).ms

    return ids.numel() * 2304 / min(ms(*how) for how in probes.REDUCTIONS) * 1e3


def ceilings(clock: Clock) -> tuple[dict[str, float | None], list[str]]:
    """Operations and bytes a second of the things in CEILINGS; and why some are missing. On a CPU: none."""
    found: dict[str, float | None] = dict.fromkeys(CEILINGS)
    if not clock.cuda:
        return found, ["ceilings are measured on CUDA only"]
    reasons = []
    for name, probe in (("gemm", _gemm), ("copy", _copy), ("gather", _gather), ("reduction", _reduction)):
        try:
            found[name] = probe(clock)
        except Exception as error:  # Triton is missing, or the device is full
            text = str(error).strip().splitlines() or [""]
            reasons.append(f"no ceiling of {name}: {type(error).__name__}: {text[0]}")
    return found, reasons
