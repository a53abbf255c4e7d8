"""``launch plan``: the runs as a table with costs, the sbatch text, Slurm's opinion, a simulation."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict

from clip_linear.errors import UserError
from clip_linear_launch import budget
from clip_linear_launch.commands.run import backend_of
from clip_linear_launch.commands.tables import count, duration, show
from clip_linear_launch.expand import Run, expand
from clip_linear_launch.missing import missing_data
from clip_linear_launch.sweep import Sweep, load

_COLUMNS = ("run", "params", "vision", "GMACs", "samples", "batch", "steps", "FLOPs", "GPU-h", "resources")


def plan(args: argparse.Namespace) -> int:
    """Print what a sweep would run; exit 2 when it is above its GPU-hour limit."""
    sweep = load(args.sweep, args.root)
    runs = expand(sweep)
    costs = budget.costs(sweep, runs)
    if args.json:
        print(json.dumps([_record(r, c) for r, c in zip(runs, costs)], indent=1))
    else:
        backend = backend_of(sweep, args.backend)
        _show(runs, costs)
        print(_totals(sweep, runs, costs, backend))
        for line in warnings(sweep, runs):
            print(f"warning: {line}")
        if args.sbatch or args.test_only:
            _slurm(sweep, runs, args)
        if args.simulate is not None:
            from clip_linear_launch.simulate import report

            print(report(sweep, runs, costs, args.simulate))
    budget.refuse_above_limit(sweep, runs, args.yes)
    return 0


def _record(run: Run, cost: budget.Cost) -> dict:
    keys = ("run_id", "model", "image", "text", "samples", "global_batch", "steps", "seed", "tuning")
    record = {k: getattr(run, k) for k in keys}
    return (
        record | asdict(run.size) | {"gmacs_total": run.gmacs_total, "resources": asdict(run.resources)} | asdict(cost)
    )


def _show(runs: list[Run], costs: list[budget.Cost]) -> None:
    rows = [
        (
            r.run_id,
            count(r.size.n_params_total),
            count(r.size.n_params_vision),
            r.size.gmacs,
            count(r.samples),
            r.global_batch,
            r.steps,
            f"{c.flops:.2e}",
            c.gpu_hours,
            resources(r),
        )
        for r, c in zip(runs, costs)
    ]
    show(_COLUMNS, rows)


def resources(run: Run) -> str:
    """``2×4 GPU 12:00:00 gpu``: nodes × GPUs (or tasks), time, partition."""
    r = run.resources
    width = f"{r.nodes}×{r.gpus_per_node} GPU" if r.gpus_per_node else f"{r.nodes}×{r.tasks} CPU"
    return " ".join(str(part) for part in (width, r.time, r.partition) if part is not None)


def _totals(sweep: Sweep, runs: list[Run], costs: list[budget.Cost], backend: str) -> str:
    hours = [c.gpu_hours for c in costs]
    gpu = "unknown" if None in hours else f"{sum(h for h in hours if h is not None):.3g}"
    sources = Counter(c.source for c in costs)
    how = "; ".join(f"{n} runs: {source}" if len(sources) > 1 else source for source, n in sources.items())
    lines = [
        f"{len(runs)} runs on {backend} in {sweep.folder}",
        f"total: {count(sum(r.samples for r in runs))} samples, {sum(c.flops for c in costs):.3g} FLOPs "
        f"(samples × GMACs × 2 × {budget.TRAIN_FACTOR}), {gpu} GPU-hours ({how}), "
        f"{sum(c.disk_bytes for c in costs) / 1e9:.3g} GB on disk",
    ]
    if sweep.resources.time_s is not None:
        lines.append(f"at most {duration(max(r.resources.time_s or 0 for r in runs))} for one attempt of a run")
    return "\n".join(lines)


def warnings(sweep: Sweep, runs: list[Run]) -> list[str]:
    """What would spoil a comparison of these runs, or stop them."""
    found = missing_data(sweep, runs)
    batches = sorted({r.global_batch for r in runs})
    if len(batches) > 1:
        found.append(
            f"global batch sizes differ ({', '.join(map(str, batches))}): a contrastive loss depends on it; "
            "compare zero-shot error, or give [per_model] batch-size so that batch-size × ranks is equal"
        )
    tried = Counter(r.cell for r in runs)
    if len(set(tried.values())) > 1:
        found.append("some runs are tuned over more alternatives than others ([per_model] lists): unequal tuning")
    short = [r for r in runs if r.resources.time_s is not None and r.resources.time_s <= 600]
    if short and any(r.resources.gpus_per_node for r in short):
        found.append(
            f"{len(short)} runs have a time limit of 10 minutes or less: Slurm may signal up to a minute early"
        )
    return found


def _slurm(sweep: Sweep, runs: list[Run], args: argparse.Namespace) -> None:
    from clip_linear_launch import sbatch

    for group in sbatch.groups(sweep, runs):
        text = sbatch.script(sweep, group)
        if args.sbatch:
            print(f"\n# {len(group)} runs: {group[0].run_id}{', …' if len(group) > 1 else ''}\n{text}")
        if args.test_only:
            good, answer = sbatch.test_only(text)
            print(f"sbatch --test-only for {len(group)} runs: {answer}")
            if not good:
                raise UserError(f"Slurm would refuse {group[0].run_id} and {len(group) - 1} others: {answer}")
