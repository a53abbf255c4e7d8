"""A run's folder: claimed by one run, cut back on resume, closed by done.json or failed.json."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from clip_linear.errors import UserError
from clip_linear.files import append_jsonl, read_jsonl, write_json, write_text
from clip_linear.provenance import environment
from clip_linear.train.config import TrainConfig, from_toml

log = logging.getLogger(__name__)
CONFIG, ENV, METRICS, EVAL, EVALS = "config.toml", "env.json", "metrics.jsonl", "eval.json", "evals.jsonl"
FAULTS, ATTEMPTS, STATE, DONE, FAILED = "data_faults.jsonl", "attempts.jsonl", "state.json", "done.json", "failed.json"
LAUNCHED = "CLIP_LINEAR_RUN"  # set by the launcher's worker, which then keeps attempts.jsonl
HEARTBEAT_S = 30.0


def is_done(run_dir: Path) -> bool:
    """Whether the run is finished; done.json alone decides."""
    return (run_dir / DONE).is_file()


def check_same_run(run_dir: Path, config: TrainConfig) -> None:
    """Raise UserError when the folder holds another run, naming what differs."""
    path = run_dir / CONFIG
    if not path.is_file():
        strange = sorted(p.name for p in run_dir.glob("*") if p.name in (METRICS, DONE, "checkpoints"))
        if strange:
            raise UserError(f"{str(run_dir)!r} holds {', '.join(strange)} but no config.toml; choose another --run-dir")
        return
    there = from_toml(path.read_text(encoding="utf-8"))
    if there.run_id != config.run_id and not _never_started(run_dir):
        raise UserError(
            f"{str(run_dir)!r} holds another run, {there.run_id} ({_differences(there, config)}); "
            "choose another --run-dir or --name, or start it with its own flags"
        )


def take_over(run_dir: Path, config: TrainConfig) -> None:
    """Forget how the last attempt failed; a folder whose run failed before its first step becomes this run's."""
    if _never_started(run_dir):
        write_text(run_dir / CONFIG, config.to_toml())
    (run_dir / FAILED).unlink(missing_ok=True)


def _never_started(run_dir: Path) -> bool:
    """Whether the run here failed before its first step: there is nothing to lose, the next start takes its folder."""
    began = (METRICS, DONE, "open_clip_config.json")
    return (
        (run_dir / FAILED).is_file()
        and not any((run_dir / name).exists() for name in began)
        and not any((run_dir / "checkpoints").glob("*.pt"))
    )


def _differences(there: TrainConfig, here: TrainConfig) -> str:
    before, now = json.loads(there.numbers()), json.loads(here.numbers())
    flags = [before.pop("flags"), now.pop("flags")]
    pairs = [(k, before[k], now[k]) for k in before] + [
        (f"--{k.replace('_', '-')}", flags[0].get(k, "its default"), flags[1].get(k, "its default"))
        for k in sorted({*flags[0], *flags[1]})
    ]
    found = [f"{k}: {a} there, {b} here" if k != "model" else "another model" for k, a, b in pairs if a != b]
    return "; ".join(found[:4])


def claim(run_dir: Path, config: TrainConfig, world_table: list[dict[str, Any]]) -> None:
    """Make the folder this run's: config.toml once, env.json anew. Raises UserError for another run's folder."""
    check_same_run(run_dir, config)
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (run_dir / CONFIG).is_file():
        write_text(run_dir / CONFIG, config.to_toml())
    write_json(run_dir / ENV, environment() | {"ranks": world_table})


def cut_back(run_dir: Path, step: int) -> None:
    """Drop the rows after ``step``: the resumed run writes them again."""
    for name in (METRICS, EVALS):
        rows = read_jsonl(run_dir / name)
        kept = [row for row in rows if row.get("step", 0) <= step]
        if len(kept) < len(rows) or not _ends_whole(run_dir / name):
            write_text(run_dir / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))


def _ends_whole(path: Path) -> bool:
    if not path.is_file():
        return True
    with open(path, "rb") as f:
        f.seek(0, os.SEEK_END)
        if f.tell() == 0:
            return True
        f.seek(-1, os.SEEK_END)
        return f.read(1) == b"\n"


def attempts_so_far(run_dir: Path) -> int:
    """How often the run was started before."""
    return len({row.get("attempt") for row in read_jsonl(run_dir / ATTEMPTS)})


class Attempt:
    """This start of the run: its heartbeat in state.json, its record, and how it ended. Rank 0 only."""

    def __init__(self, run_dir: Path, config: TrainConfig) -> None:
        self.run_dir, self.config = run_dir, config
        self.state: dict[str, Any] = {"state": "STARTING", "run_id": config.run_id, "step": 0, "steps": config.steps}
        self.state |= {"samples_seen": 0, "samples": config.budget, "loss": None, "samples_per_s": None, "eta_s": None}
        self.state |= {"host": socket.gethostname(), "pid": os.getpid()}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._beat: threading.Thread | None = None
        self._alone = LAUNCHED not in os.environ
        self.number = 0

    def start(self, step: int) -> None:
        """Begin: the record's first line, the heartbeat running."""
        self.number = 1 + attempts_so_far(self.run_dir)
        if self._alone:
            host = self.state["host"]
            row = {"attempt": self.number, "start": time.time(), "start_step": step, "host": host, "pid": os.getpid()}
            append_jsonl(self.run_dir / ATTEMPTS, row)
        self.beat(state="RUNNING", step=step, start_step=step)
        self._beat = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._beat.start()

    def update(self, **values: Any) -> None:
        """Note new values for the next heartbeat."""
        self.state |= values | {"step_t": time.time()}

    def beat(self, **values: Any) -> None:
        """Write state.json now."""
        with self._lock:
            self.state |= values
            try:
                write_json(self.run_dir / STATE, self.state | {"t": time.time()})
            except (OSError, ValueError) as error:  # a heartbeat that fails must not end a run that can go on
                log.warning("state.json not written: %s", error)

    def _run(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            self.beat()

    def end(self, code: int, reason: str = "") -> None:
        """Stop the heartbeat and write the record's last line."""
        kind, state = {0: ("done", "DONE"), 75: ("timeout", "STOPPED"), 143: ("stopped", "STOPPED")}.get(
            code, ("error", "FAILED")
        )
        self._stop.set()
        if self._beat is not None:
            self._beat.join()
        self.beat(state=state)
        if self._alone:
            row = {"attempt": self.number, "end": time.time(), "end_step": self.state["step"], "exit": code}
            append_jsonl(self.run_dir / ATTEMPTS, row | {"class": kind, "reason": reason})


def write_failed(run_dir: Path, error: BaseException, rank: int, step: int | None) -> None:
    """Say in failed.json why the run ended. The first rank to fail wins: the others' errors follow from its."""
    path = run_dir / FAILED
    if path.exists() or not run_dir.is_dir():
        return
    text = "".join(traceback.format_exception(error))
    reason = "; ".join([*getattr(error, "__notes__", []), f"{type(error).__name__}: {error}"])
    facts = {"reason": reason, "rank": rank, "host": socket.gethostname(), "step": step}
    try:
        write_json(path, facts | {"t": time.time(), "traceback": text})
    except OSError as problem:
        log.warning("failed.json not written: %s", problem)


def free_gib(path: Path) -> float:
    """Free space of the file system, in GiB."""
    return shutil.disk_usage(path).free / 2**30
