"""Honest timing: candidates take turns in one process, so that a busy machine is busy for all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds a call: the best, the median, and the 20 % and 80 % quantiles of ``n`` calls."""

    best: float
    median: float
    low: float
    high: float
    n: int


def interleave(
    candidates: dict[str, Callable[[], object]], *, budget_s: float = 1.0, rounds: int = 5, device: str = "cpu"
) -> dict[str, Times]:
    """Time every candidate in turns, at least ``rounds`` times and until ``budget_s`` is spent.

    Every candidate runs once before, untimed. A round that would pass ten times the budget is the last one.
    """
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():
        call()
    start = time.perf_counter()
    done = 0
    while done < rounds or time.perf_counter() - start < budget_s:
        for name, call in candidates.items():
            samples[name].append(_once(call, device))
        done += 1
        spent = time.perf_counter() - start
        if spent * (done + 1) / done > 10 * budget_s and done >= 2:
            break
    return {name: _times(values) for name, values in samples.items()}


def _once(call: Callable[[], object], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def _times(values: list[float]) -> Times:
    ordered = sorted(values)

    def quantile(share: float) -> float:
        at = share * (len(ordered) - 1)
        low = int(at)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (at - low) * (ordered[high] - ordered[low])

    return Times(best=ordered[0], median=quantile(0.5), low=quantile(0.2), high=quantile(0.8), n=len(ordered))


def peak_bytes(call: Callable[[], object], device: str = "cpu") -> int | None:
    """Memory that a call needs at its peak beyond what stood before, its result included; None where unknown.

    On CPU it is resident memory, from Linux's resettable high-water mark: exact to about a MiB for large calls.
    """
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        call()
        return max(0, _status("VmHWM") - before)
    except OSError:
        return None


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def load_average() -> float | None:
    """Runnable processes over the last minute, or None where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
