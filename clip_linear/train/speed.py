"""How fast a run is: samples and tokens a second, waiting for data, and an estimate of the hardware's use (MFU)."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch
from torch import nn

from clip_linear.errors import UserError
from clip_linear.train.config import TrainConfig
from clip_linear.train.effective import effective_config
from clip_linear.train.world import World

# Dense peak of one device in TFLOP/s by a part of its name: (16-bit, 32-bit with TF32), from the makers' data sheets.
_PEAKS = {"H200": (989.0, 494.0), "H100": (989.0, 494.0), "A100": (312.0, 156.0), "L40S": (362.0, 183.0)}
_FORWARD_AND_BACKWARD = 3  # a backward pass costs two forward passes; what checkpointing computes again does not count


class Clock:
    """Throughput since it was last read."""

    def __init__(self, config: TrainConfig, model: nn.Module, world: World) -> None:
        self.tokens = tokens_per_sample(model)
        peak = config.peak_tflops or known_peak(world.device, config.precision)
        macs = None if peak is None else macs_per_sample(config)
        # The share of the peak of all devices that one sample a second takes.
        self.share = (
            None
            if macs is None or peak is None
            else 2 * _FORWARD_AND_BACKWARD * macs / (peak * 1e12 * world.world_size)
        )
        self._restart()

    def _restart(self) -> None:
        self.start = time.perf_counter()
        self.samples = self.steps = 0
        self.waited = 0.0  # seconds that the loop stood still for the next batch

    def count(self, samples: int) -> None:
        """Count one step."""
        self.samples += samples
        self.steps += 1

    def read(self) -> dict[str, float]:
        """The rates since the last reading, all ranks together; starts anew."""
        seconds = max(1e-9, time.perf_counter() - self.start)
        rate = self.samples / seconds
        rates = {"samples_per_s": rate, "step_s": seconds / max(1, self.steps)}
        rates["data_wait_frac"] = min(1.0, self.waited / seconds)
        if self.tokens is not None:
            rates["tokens_per_s"] = rate * self.tokens
        if self.share is not None:
            rates["mfu"] = rate * self.share
        self._restart()
        return rates


def tokens_per_sample(model: Any) -> int | None:
    """Image tokens (with the class token) and text tokens of one sample; None where the image tower has no grid."""
    grid, context = getattr(model.visual, "grid_size", None), getattr(model, "context_length", None)
    if not isinstance(grid, tuple) or not isinstance(context, int):
        return None
    return int(grid[0] * grid[1]) + 1 + context


def macs_per_sample(config: TrainConfig) -> float | None:
    """Multiply–accumulates of one image and one text forward; None for towers that cannot be counted."""
    from clip_linear.profile import profile

    try:
        return profile(effective_config(config)).gmacs * 1e9
    except UserError:
        return None


def known_peak(device: torch.device, precision: str) -> float | None:
    """The device's peak at a precision in TFLOP/s; None where it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for part, (half, single) in _PEAKS.items():
        if part in name:
            return single if precision == "fp32" else half
    return None


def memory(device: torch.device) -> dict[str, float]:
    """Peak resident memory of this process and peak memory of its device, in GiB."""
    unit = 2**30 if sys.platform == "darwin" else 2**20
    out = {"rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}
    if device.type == "cuda":
        out["device_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return out
