"""``launch status`` and ``launch logs``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

from clip_linear.errors import UserError
from clip_linear_launch import actions, layout, rundir
from clip_linear_launch.commands.tables import duration, show
from clip_linear_launch.status import LIVE, Status, statuses
from clip_linear_launch.sweep import load

_COLUMNS = ("run", "state", "step", "%", "samples/s", "loss", "eta", "gpu-h", "tries", "node", "reason")


def status(args: argparse.Namespace) -> int:
    """Print the state of every run."""
    sweep = load(args.sweep, args.root)
    folder = sweep.folder
    changed = rundir.read(folder / layout.SWEEP).get("digest", sweep.digest) != sweep.digest
    while True:
        seen = statuses(folder)
        if args.json:
            print(json.dumps([s.row() for s in seen], indent=1))
        else:
            _show(seen)
            if changed:
                print("the sweep file has changed since; `launch run` takes the changes in")
        if args.watch is None or not any(s.state in LIVE for s in seen):
            return 0
        time.sleep(args.watch)


def _show(seen: list[Status]) -> None:
    rows = [
        (
            s.run_id,
            s.state,
            f"{s.step}/{s.steps}",
            f"{100 * s.step / s.steps:.0f}%" if s.steps else "-",
            s.samples_per_s,
            s.loss,
            duration(s.eta_s),
            s.gpu_hours,
            s.attempts,
            s.node or "-",
            s.reason[:80],
        )
        for s in seen
    ]
    counts = ", ".join(f"{n} {state}" for state, n in Counter(s.state for s in seen).items())
    show(_COLUMNS, rows)
    print(f"{len(seen)} runs: {counts}", flush=True)


def logs(args: argparse.Namespace) -> int:
    """Print the end of a run's log, and what is added to it with -f."""
    folder = load(args.sweep, args.root).folder
    chosen = actions.choose(folder, [args.run] if args.run else [])
    if args.run and len(chosen) > 1:
        raise UserError(
            f"run {args.run!r} fits {len(chosen)} runs ({chosen[0].name}, {chosen[1].name}, …); say more of it"
        )
    existing = [p for p in (_log_of(c, args.rank) for c in chosen) if p is not None]
    if not existing:
        raise UserError("no log yet; run: clip-linear launch status")
    path = max(existing, key=lambda p: p.stat().st_mtime)
    with open(path, encoding="utf-8", errors="replace") as f:
        lines = f.readlines()
        sys.stdout.write("".join(lines[-args.lines :]))
        sys.stdout.flush()
        while args.follow:
            new = f.readline()
            if new:
                sys.stdout.write(new)
                sys.stdout.flush()
            elif (path.parent.parent / rundir.DONE).exists() or (path.parent.parent / rundir.FAILED).exists():
                break
            else:
                time.sleep(0.3)
    return 0


def _log_of(run_dir: Path, rank: int) -> Path | None:
    """The rank's log; what submitit wrote where the worker never came to write one."""
    path = run_dir / "log" / f"rank-{rank}.log"
    if path.exists():
        return path
    job = rundir.read(run_dir / rundir.SUBMITTED).get("job")
    found = sorted(run_dir.parent.parent.glob(f"submitit/*/{job}_*_log.err")) if job else []
    return found[0] if found else None
