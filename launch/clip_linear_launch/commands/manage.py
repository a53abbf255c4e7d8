"""``launch cancel``, ``launch clean`` and ``launch export``."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from clip_linear_launch import actions, layout, rundir
from clip_linear_launch.expand import expand
from clip_linear_launch.sweep import load


def cancel(args: argparse.Namespace) -> int:
    """Mark runs cancelled, then stop them."""
    folder = load(args.sweep, args.root).folder
    marked = actions.cancel(actions.choose(folder, args.runs))
    jobs = [job for f in marked if (job := rundir.read(f / rundir.SUBMITTED).get("job"))]
    if jobs:
        from clip_linear_launch.slurm import scancel

        scancel(jobs)
    for run_dir in marked:
        print(f"cancelled {run_dir.name}")
    print(f"{len(marked)} runs cancelled; `launch run --resubmit` starts them again")
    return 0


def clean(args: argparse.Namespace) -> int:
    """Remove what finished runs no longer need."""
    folder = load(args.sweep, args.root).folder
    freed = 0
    for run_dir in actions.choose(folder, []):
        if not (run_dir / rundir.DONE).exists():
            continue
        names = ["rdzv", rundir.SUBMITTED, *(["checkpoints"] if args.checkpoints else [])]
        for path in [run_dir / name for name in names] + list(run_dir.glob(".*.tmp")):
            freed += _remove(path, args.dry_run)
    jobs = {rundir.read(f / rundir.SUBMITTED).get("job") for f in actions.choose(folder, [])} - {None}
    if not jobs:  # no run refers to a job any more
        freed += _remove(folder / "submitit", args.dry_run)
        freed += _remove(folder / "submits", args.dry_run)
    print(f"{'would free' if args.dry_run else 'freed'} {freed / 1e6:.1f} MB")
    return 0


def _remove(path: Path, dry_run: bool) -> int:
    if not path.exists():
        return 0
    size = path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    if dry_run:
        print(f"would remove {path}")
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return size


def export(args: argparse.Namespace) -> int:
    """Write plain sbatch scripts that start the same worker."""
    from clip_linear_launch.sbatch import export as write_scripts

    sweep = load(args.sweep, args.root)
    runs = expand(sweep)
    layout.lay_out(sweep, runs)
    out = Path(args.out) if args.out else sweep.folder / "sbatch"
    for path in write_scripts(sweep, runs, out):
        print(f"sbatch {path}")
    return 0
