"""A run's folder as the launcher sees it: what to run (run.json), what happened (attempts, state), how it ended.

Everything that decides anything is read from here; no scheduler and no pickle is asked how a run ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from clip_linear.files import append_jsonl, read_jsonl, write_json

RUN, STATE, ATTEMPTS, SUBMITTED, LOCK = "run.json", "state.json", "attempts.jsonl", "submitted.json", ".lock"
DONE, FAILED, CANCELLED = "done.json", "failed.json", "cancelled.json"


def folder(sweep_folder: Path, run_id: str) -> Path:
    """The folder of a run of a sweep."""
    return sweep_folder / "runs" / run_id


def read(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when there is none."""
    try:
        with open(path, "rb") as f:
            value = json.loads(f.read())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def step(run_dir: Path) -> int:
    """The step of the newest heartbeat."""
    return int(read(run_dir / STATE).get("step") or 0)


def is_held(run_dir: Path) -> bool:
    """Whether a worker or its trainer lives (on this host, or through a file system with locks)."""
    try:
        handle = os.open(run_dir / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def holder(run_dir: Path) -> str:
    """``HOST PID`` of the worker that took the run's lock last; empty before the first."""
    try:
        return (run_dir / LOCK).read_text().strip()
    except OSError:
        return ""


def record_attempt(run_dir: Path, **values: Any) -> None:
    """Append to attempts.jsonl: one line when an attempt starts, one with the same ``attempt`` when it ends."""
    append_jsonl(run_dir / ATTEMPTS, values)


def attempts(run_dir: Path) -> list[dict[str, Any]]:
    """The attempts in order, start and end lines merged. One without ``class`` runs still, or was killed."""
    merged: dict[int, dict[str, Any]] = {}
    for row in read_jsonl(run_dir / ATTEMPTS):
        merged.setdefault(int(row.get("attempt", 0)), {}).update(row)
    return list(merged.values())


def close_last_attempt(run_dir: Path) -> list[dict[str, Any]]:
    """The attempts before a new one starts. What failed.json says goes into the last one's record, and the file away;
    a last attempt without an end was killed together with its worker (or its node died)."""
    rows = attempts(run_dir)
    failed = read(run_dir / FAILED)
    if rows and (failed or "class" not in rows[-1]) and rows[-1].get("class") not in ("error", "infrastructure"):
        end = {
            "attempt": rows[-1]["attempt"],
            "class": failed.get("class", "infrastructure"),
            "reason": failed.get("reason", "killed together with its worker"),
            "node": failed.get("node", rows[-1].get("nodes")),
            "end": rows[-1].get("end") or read(run_dir / STATE).get("t") or rows[-1].get("start"),
            "end_step": rows[-1].get("end_step", step(run_dir)),
        }
        record_attempt(run_dir, **end)
        rows[-1].update(end)
    (run_dir / FAILED).unlink(missing_ok=True)
    return rows


def faults_in_a_row(rows: list[dict[str, Any]]) -> int:
    """Infrastructure failures since an attempt last made progress, so that a long run is not worn down."""
    count = 0
    for row in rows:
        if row.get("class", "infrastructure") == "infrastructure":
            count += 1
        elif (row.get("end_step") or 0) > (row.get("start_step") or 0):
            count = 0
    return count


def device_hours(rows: list[dict[str, Any]], devices: int, last_seen: float | None, live: bool) -> float:
    """Hours × devices of all attempts; one that was killed counts until its last heartbeat."""
    total = 0.0
    for row in rows:
        start = float(row.get("start") or 0.0)
        end = row.get("end") or (time.time() if live and row is rows[-1] else max(last_seen or 0.0, start))
        total += max(0.0, float(end) - start)
    return total / 3600 * devices


def fail(run_dir: Path, kind: str, reason: str, **more: Any) -> None:
    """Say in failed.json why the run failed. What the trainer wrote there stays (its traceback), with our class."""
    there = read(run_dir / FAILED)
    if "class" not in there:
        with contextlib.suppress(FileNotFoundError):
            write_json(run_dir / FAILED, {"class": kind, "reason": reason, "t": time.time(), **more} | there)
