"""What a sweep costs: FLOPs, GPU-hours and disk, per run and in all.

FLOPs = samples × (image + text multiply–accumulates) × 2 × 3: two operations each, and a backward pass of twice the
forward. GPU-hours come from measured samples/s where a row of that model and GPU exists, else from peak × MFU.
Check: ViT-B/32 on 12.8e9 samples is 5.7e20 FLOP; Cherti et al. (2023) recorded 8.6 thousand A100-hours for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clip_linear.errors import UserError
from clip_linear_launch.expand import Run
from clip_linear_launch.sweep import Sweep

TRAIN_FACTOR = 3  # forward + backward, in forward passes
_BYTES_PER_PARAMETER = 4 * 3  # float32 weights and AdamW's two moments
_LOG_BYTES_PER_STEP = 250


@dataclass(frozen=True, kw_only=True)
class Cost:
    """``gpu_hours`` is None where nothing says how fast a device is; ``source`` says what was taken."""

    flops: float
    gpu_hours: float | None
    source: str
    disk_bytes: float


def flops(run: Run) -> float:
    """Training FLOPs of a run."""
    return run.gmacs_total * 1e9 * 2 * TRAIN_FACTOR


def costs(sweep: Sweep, runs: list[Run]) -> list[Cost]:
    """The cost of each run."""
    measured = _measured(sweep)
    return [_cost(sweep, run, measured) for run in runs]


def _cost(sweep: Sweep, run: Run, measured: dict[str, float]) -> Cost:
    hardware = sweep.hardware
    rate = measured.get(run.model)
    hours: float | None
    if rate:
        hours, source = run.samples / rate / 3600, f"measured {rate:.0f} samples/s per GPU"
    elif hardware.peak_tflops:
        hours = flops(run) / (hardware.peak_tflops * 1e12 * hardware.mfu) / 3600
        source = f"{hardware.peak_tflops:g} TFLOP/s × MFU {hardware.mfu:g}"
    else:
        hours, source = None, "unknown: give [hardware] peak_tflops or bench_rows"
    keep = 2.0  # the trainer keeps its two newest checkpoints, and the weights once more for OpenCLIP
    disk = run.size.n_params_total * (_BYTES_PER_PARAMETER * keep + 4) + run.steps * _LOG_BYTES_PER_STEP
    return Cost(flops=flops(run), gpu_hours=hours, source=source, disk_bytes=disk)


def _measured(sweep: Sweep) -> dict[str, float]:
    """Samples/s of one device by model name, from the sweep's bench rows (the newest row of a model wins)."""
    if not sweep.hardware.bench_rows:
        return {}
    from clip_linear_eval.results import read_rows

    found: dict[str, tuple[str, float]] = {}
    for name in sweep.hardware.bench_rows:
        for row in read_rows(Path(sweep.here / name)):
            rate, date = _rate(row), str(row.get("date") or "")
            fits = sweep.hardware.name is None or sweep.hardware.name in str(row.get("device") or "")
            if fits and rate > 0 and date >= found.get(str(row.get("model")), ("", 0.0))[0]:
                found[str(row.get("model"))] = (date, rate)
    return {model: rate for model, (_, rate) in found.items()}


def _rate(row: dict[str, Any]) -> float:
    """Samples/s of one device from a bench's row, or from any row that `collect` wrote of an earlier sweep; else 0."""
    if row.get("metric") == "samples_per_s":
        return float(row.get("value") or 0.0)
    return float(row.get("samples_per_sec") or 0.0) / max(1, int(row.get("gpus") or 1))


def refuse_above_limit(sweep: Sweep, runs: list[Run], yes: bool) -> None:
    """Raise UserError when the sweep costs more GPU-hours than [limits] allows, unless ``yes``."""
    limit = sweep.limits.max_gpu_hours
    if limit is None or yes:
        return
    hours = [c.gpu_hours for c in costs(sweep, runs)]
    if any(h is None for h in hours):
        raise UserError(
            "[limits] max_gpu_hours is set but the cost is not known; "
            "give [hardware] peak_tflops or bench_rows, or add --yes"
        )
    total = sum(h for h in hours if h is not None)
    if total > limit:
        raise UserError(
            f"the sweep needs about {total:.0f} GPU-hours, above [limits] max_gpu_hours = {limit:g}; add --yes"
        )
