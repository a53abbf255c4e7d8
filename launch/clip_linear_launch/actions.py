"""What ``run`` does next with each run: skip what is finished, leave what lives, continue what was interrupted."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from clip_linear.errors import UserError, unknown
from clip_linear.files import write_json
from clip_linear_launch import rundir, status


def due(
    folders: list[Path], max_retries: int, retry_failed: bool = False, resubmit: bool = False
) -> tuple[list[Path], list[status.Status]]:
    """(the folders to start now, the status of all). ``retry_failed`` takes failed runs too, ``resubmit`` cancelled."""
    looked = status.look(folders)
    start = []
    for folder, (seen, kind) in zip(folders, looked):
        again = kind == "infrastructure" and rundir.faults_in_a_row(rundir.attempts(folder)) <= max_retries
        again = again and _submissions_without_a_start(folder) <= max_retries
        if (
            seen.state in ("NEW", "LOST")
            or (seen.state == "INTERRUPTED" and (again or not kind))
            or (seen.state in ("FAILED", "INTERRUPTED") and (again or retry_failed))
            or (seen.state == "CANCELLED" and resubmit)
        ):
            start.append(folder)
    return start, [seen for seen, _ in looked]


def summary(seen: list[status.Status], due: int) -> str:
    """One line: how many runs are in which state, and how many start now."""
    count = Counter(s.state for s in seen)
    hint = " (`launch retry` starts failed runs again)" if count["FAILED"] and not due else ""
    return f"{len(seen)} runs: {', '.join(f'{n} {state}' for state, n in count.items())}; {due} to start{hint}"


def _submissions_without_a_start(folder: Path) -> int:
    return int(rundir.read(folder / rundir.SUBMITTED).get("unstarted") or 0)


def clear_end(folders: Iterable[Path]) -> None:
    """Forget that runs failed or were cancelled, so that they may start again (attempts.jsonl keeps the reasons)."""
    for folder in folders:
        if (folder / rundir.FAILED).exists():
            rundir.close_last_attempt(folder)
        (folder / rundir.FAILED).unlink(missing_ok=True)
        (folder / rundir.CANCELLED).unlink(missing_ok=True)


def choose(sweep_folder: Path, patterns: list[str]) -> list[Path]:
    """Run folders by id or by a part of it; all of them without patterns. Raises UserError for one that fits none."""
    ids = status.sweep_runs(sweep_folder)
    chosen = []
    for pattern in patterns:
        found = [i for i in ids if i == pattern] or [i for i in ids if pattern in i]
        if not found:
            raise unknown("run", pattern, ids, "run: clip-linear launch status SWEEP.toml")
        chosen += found
    return [rundir.folder(sweep_folder, i) for i in (dict.fromkeys(chosen) if patterns else ids)]


def cancel(folders: list[Path], reason: str = "clip-linear launch cancel") -> list[Path]:
    """Mark runs cancelled, *then* tell their processes here to stop; returns those that were marked.

    The mark comes first, so that no path (requeue by the worker, by Slurm, a later ``run``) starts them again.
    """
    marked = []
    for folder in folders:
        if not (folder / rundir.DONE).exists() and not (folder / rundir.CANCELLED).exists():
            write_json(folder / rundir.CANCELLED, {"t": time.time(), "reason": reason})
            marked.append(folder)
    for folder in marked:
        host, _, pid = rundir.holder(folder).partition(" ")
        if pid and host == socket.gethostname() and rundir.is_held(folder):
            try:
                os.kill(int(pid), signal.SIGTERM)
            except ProcessLookupError:
                continue
            except PermissionError:
                raise UserError(f"{folder.name} belongs to another user (pid {pid}); cannot stop it") from None
    return marked
