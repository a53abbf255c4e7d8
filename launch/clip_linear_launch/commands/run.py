"""``launch run`` and ``launch retry``: start what is due."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import subprocess
import sys

from clip_linear.errors import UserError
from clip_linear_launch import actions, budget, layout, local, rundir
from clip_linear_launch.expand import Run, expand
from clip_linear_launch.missing import missing_data
from clip_linear_launch.sbatch import check_delay
from clip_linear_launch.sweep import Sweep, load


def backend_of(sweep: Sweep, asked: str | None) -> str:
    """local or slurm; ``auto`` takes Slurm where sbatch is on the PATH, and prints its choice."""
    name = asked or sweep.head.backend
    if name != "auto":
        return name
    found = shutil.which("sbatch")
    print(f"backend: {'slurm' if found else 'local'} ({found or 'no sbatch on the PATH'})")
    return "slurm" if found else "local"


def run(args: argparse.Namespace) -> int:
    """Lay the sweep out and start what is due."""
    sweep = load(args.sweep, args.root)
    runs = expand(sweep)
    backend = backend_of(sweep, args.backend)
    budget.refuse_above_limit(sweep, runs, args.yes)
    for line in missing_data(sweep, runs):
        print(f"warning: {line}")
    if args.dry_run:
        folders = [rundir.folder(sweep.folder, r.run_id) for r in runs]
        due, seen = actions.due(folders, sweep.limits.max_retries, args.retry_failed, args.resubmit)
        starting = {f.name for f in due}
        for status in seen:
            print(f"{'start' if status.run_id in starting else 'leave':<6} {status.state:<12} {status.run_id}")
        return 0
    layout.lay_out(sweep, runs)
    return start(sweep, runs, backend, args, retry_failed=args.retry_failed, resubmit=args.resubmit)


def retry(args: argparse.Namespace) -> int:
    """Start failed runs again, all or those named."""
    sweep = load(args.sweep, args.root)
    chosen = {f.name for f in actions.choose(sweep.folder, args.runs)}
    runs = [r for r in expand(sweep) if r.run_id in chosen]
    layout.lay_out(sweep, expand(sweep))
    return start(sweep, runs, backend_of(sweep, args.backend), args, retry_failed=True, only_failed=True)


def start(
    sweep: Sweep,
    runs: list[Run],
    backend: str,
    args: argparse.Namespace,
    retry_failed: bool = False,
    resubmit: bool = False,
    only_failed: bool = False,
) -> int:
    """Start the due ones of ``runs``; returns 0, or 1 when a local run failed."""
    if backend == "slurm":
        from clip_linear_launch.slurm import submit_due

        return submit_due(sweep, runs, print, retry_failed, resubmit, only_failed)
    _check_local(sweep, runs)
    if args.detach:
        return _detach(sweep, args)
    limits = sweep.limits
    if args.max_parallel is not None:
        if args.max_parallel < 1:
            raise UserError(f"--max-parallel {args.max_parallel} must be at least 1")
        limits = dataclasses.replace(limits, max_parallel=args.max_parallel)
    with local.only_queue(sweep.folder):
        folders = [rundir.folder(sweep.folder, r.run_id) for r in runs]
        due, seen = actions.due(folders, limits.max_retries, retry_failed, resubmit)
        if only_failed:
            failed = {s.run_id for s in seen if s.state in ("FAILED", "INTERRUPTED")}
            due = [f for f in due if f.name in failed]
        print(actions.summary(seen, len(due)), flush=True)
        if not due:
            return 0
        actions.clear_end(due)
        cost = {r.run_id: r.gmacs_total for r in runs}
        if limits.max_parallel > 1:  # the longest first: none of them is left to run alone at the end
            due.sort(key=lambda f: -cost[f.name])
        ended = local.Queue(due, limits, lambda text: print(text, flush=True)).run()
    if ended["stopped"]:
        print("stopped; the same command continues")
        return 130
    return 1 if ended["failed"] else 0


def _check_local(sweep: Sweep, runs: list[Run]) -> None:
    wide = [r for r in runs if r.resources.nodes > 1]
    if wide:
        raise UserError(
            f'{wide[0].run_id} wants {wide[0].resources.nodes} nodes; the local queue has one: use backend = "slurm"'
        )
    for run in runs:
        check_delay(sweep, run.resources)


def _detach(sweep: Sweep, args: argparse.Namespace) -> int:
    """The same command without --detach, in a session of its own, writing to queue.log."""
    sweep.folder.mkdir(parents=True, exist_ok=True)
    log = sweep.folder / "queue.log"
    given = {k: v for k, v in vars(args).items() if k not in ("action", "sweep", "runs", "detach", "dry_run") and v}
    argv = [sys.executable, "-m", "clip_linear", "launch", args.action, args.sweep, *getattr(args, "runs", [])]
    for key, value in given.items():
        argv += [f"--{key.replace('_', '-')}", *([] if value is True else [str(value)])]
    with open(log, "ab") as out:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    print(f"queue {child.pid} runs in the background; its log: {log}")
    return 0
