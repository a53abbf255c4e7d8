"""The state of every run of a sweep, computed from the run folders and one look at the scheduler."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clip_linear.errors import UserError
from clip_linear_launch import layout, rundir, scheduler

# NEW → SUBMITTED → PENDING → RUNNING → DONE, or STOPPING → REQUEUED → PENDING, or INTERRUPTED, FAILED, CANCELLED, LOST
LIVE = ("SUBMITTED", "PENDING", "RUNNING", "STOPPING", "REQUEUED", "STALE")
LOST_AFTER_S = 300.0  # a job that neither squeue nor sacct knows may be only just submitted


@dataclass(frozen=True, kw_only=True)
class Status:
    """One line of ``launch status``."""

    run_id: str
    model: str
    state: str
    step: int
    steps: int
    samples_seen: int
    samples_per_s: float | None
    loss: float | None
    eta_s: float | None
    gpu_hours: float
    attempts: int
    node: str
    reason: str

    def row(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return asdict(self)


def sweep_runs(sweep_folder: Path) -> list[str]:
    """Ids of the runs that were laid out, in the sweep's order. Raises UserError when there are none."""
    laid_out = rundir.read(sweep_folder / layout.SWEEP).get("runs")
    if not laid_out:
        raise UserError(f"{str(sweep_folder)!r} holds no sweep yet; run: clip-linear launch run SWEEP.toml")
    return list(laid_out)


def statuses(sweep_folder: Path) -> list[Status]:
    """All runs of a sweep's folder, in the sweep's order."""
    folders = [rundir.folder(sweep_folder, run_id) for run_id in sweep_runs(sweep_folder)]
    return [status for status, _ in look(folders)]


def look(folders: list[Path]) -> list[tuple[Status, str]]:
    """Status and, for failures, their class (``error`` | ``infrastructure``, else "") of each run folder."""
    submitted = {folder: rundir.read(folder / rundir.SUBMITTED) for folder in folders}
    open_jobs = [
        s["job"]
        for folder, s in submitted.items()
        if s.get("job") and not any((folder / end).exists() for end in (rundir.DONE, rundir.CANCELLED))
    ]
    queue = scheduler.queued(open_jobs) if open_jobs else {}
    unknown = [j for j in open_jobs if j not in (queue or {})]
    past = scheduler.accounted(unknown) if unknown else {}
    return [_one(folder, submitted[folder], queue, past) for folder in folders]


def _one(
    folder: Path, submitted: dict[str, Any], queue: dict[str, scheduler.Job] | None, past: dict[str, scheduler.Job]
) -> tuple[Status, str]:
    run, beat = rundir.read(folder / rundir.RUN), rundir.read(folder / rundir.STATE)
    rows = rundir.attempts(folder)
    state, reason, kind, node = _state(folder, run, beat, rows, submitted, queue, past)
    resources = run.get("resources", {})
    devices = int(resources.get("nodes", 1)) * int(resources.get("gpus_per_node", 0))
    done = rundir.read(folder / rundir.DONE) if state == "DONE" else {}
    numbers = beat | {k: v for k, v in done.items() if k in ("step", "samples_seen", "loss", "samples_per_s")}
    status = Status(
        run_id=str(run.get("run_id", folder.name)),
        model=str(run.get("model", "")),
        state=state,
        step=int(numbers.get("step") or 0),
        steps=int(run.get("steps") or numbers.get("steps") or 0),
        samples_seen=int(numbers.get("samples_seen") or numbers.get("samples") or 0),
        samples_per_s=numbers.get("samples_per_s"),
        loss=numbers.get("loss"),
        eta_s=beat.get("eta_s", beat.get("eta")) if state == "RUNNING" else None,
        gpu_hours=rundir.device_hours(rows, devices, beat.get("t"), state in ("RUNNING", "STOPPING")),
        attempts=len(rows),
        node=node or str((rows[-1].get("nodes") if rows and state in ("RUNNING", "STOPPING", "STALE") else "") or ""),
        reason=reason,
    )
    return status, kind


def _state(
    folder: Path,
    run: dict[str, Any],
    beat: dict[str, Any],
    rows: list[dict[str, Any]],
    submitted: dict[str, Any],
    queue: dict[str, scheduler.Job] | None,
    past: dict[str, scheduler.Job],
) -> tuple[str, str, str, str]:
    """(state, reason, class of a failure, node): done/cancelled file, then squeue, then sacct, then the folder."""
    if (folder / rundir.DONE).exists():
        return "DONE", "", "", ""
    if (folder / rundir.CANCELLED).exists():
        return "CANCELLED", str(rundir.read(folder / rundir.CANCELLED).get("reason", "")), "", ""
    job_id = submitted.get("job")
    if not job_id:
        return _local(folder, run, beat, rows)
    job = (queue or {}).get(job_id)
    if job is not None and job.is_live:
        return _live(job, run, beat, rows)
    failed = rundir.read(folder / rundir.FAILED)
    if failed:
        return "FAILED", str(failed.get("reason", "")), str(failed.get("class", "error")), ""
    ended = job or past.get(job_id)
    if ended is not None and ended.is_live and queue is None:  # squeue is silent, sacct says it lives
        return _live(ended, run, beat, rows)
    if ended is not None and ended.state.startswith("CANCELLED"):
        return "CANCELLED", "cancelled with scancel", "", ""
    if ended is not None and not ended.is_live:
        if rundir.is_held(folder):  # by another job of this run, or by the last process of this one
            return "RUNNING", "", "", ""
        return _ended(ended, submitted, rows)
    return _unknown(run, beat, rows, submitted, queue is None)


def _live(job: scheduler.Job, run: dict[str, Any], beat: dict[str, Any], rows: list[dict[str, Any]]) -> Any:
    if job.is_running:
        if str(beat.get("state", "")).upper() == "STOPPING":
            return "STOPPING", "", "", job.node
        last = max(float(beat.get("t") or 0.0), float(rows[-1].get("start") or 0.0) if rows else 0.0)
        stale = float(run.get("limits", {}).get("stale_s") or 600)
        if job.state == "RUNNING" and rows and time.time() - last > stale:
            return "STALE", f"no heartbeat for {time.time() - last:.0f} s", "", job.node
        return "RUNNING", "", "", job.node
    return ("REQUEUED" if rows else "PENDING"), job.reason, "", ""


def _ended(job: scheduler.Job, submitted: dict[str, Any], rows: list[dict[str, Any]]) -> Any:
    mine = [r for r in rows if r.get("job") == submitted["job"]]
    if not mine:
        reason = f"the job ended ({job.state}) before the worker started; see: clip-linear launch logs"
        return "INTERRUPTED", reason, "infrastructure", ""
    last = mine[-1]
    if last.get("class") == "error":
        return "FAILED", str(last.get("reason", "")), "error", ""
    if last.get("class") in ("timeout", "stopped"):
        return "INTERRUPTED", str(last.get("reason", "")), "", ""
    return "INTERRUPTED", str(last.get("reason") or job.state), "infrastructure", ""


def _unknown(
    run: dict[str, Any], beat: dict[str, Any], rows: list[dict[str, Any]], submitted: dict[str, Any], silent: bool
) -> Any:
    """No scheduler knows the job: the folder says what it can."""
    now = time.time()
    open_attempt = bool(rows) and "class" not in rows[-1]
    last = max(float(beat.get("t") or 0.0), float(rows[-1].get("start") or 0.0) if rows else 0.0)
    if open_attempt and now - last < float(run.get("limits", {}).get("stale_s") or 600):
        return "RUNNING", "by its heartbeat" if silent else "", "", ""
    if now - float(submitted.get("t") or 0.0) < LOST_AFTER_S and not rows:
        return "SUBMITTED", "", "", ""
    if silent:
        return "STALE", "Slurm does not answer", "", ""
    if rows and rows[-1].get("class") in ("timeout", "stopped"):
        return "INTERRUPTED", str(rows[-1].get("reason", "")), "", ""
    return "LOST", f"job {submitted.get('job')} is known to neither squeue nor sacct", "infrastructure", ""


def _local(folder: Path, run: dict[str, Any], beat: dict[str, Any], rows: list[dict[str, Any]]) -> Any:
    if rundir.is_held(folder):
        stopping = str(beat.get("state", "")).upper() == "STOPPING"
        return ("STOPPING" if stopping else "RUNNING"), "", "", str(rows[-1].get("host", "")) if rows else ""
    failed = rundir.read(folder / rundir.FAILED)
    if failed:
        return "FAILED", str(failed.get("reason", "")), str(failed.get("class", "error")), ""
    if not rows:
        return "NEW", "", "", ""
    last = rows[-1]
    if last.get("class") in ("timeout", "stopped"):
        return "INTERRUPTED", str(last.get("reason", "")), "", ""
    return "INTERRUPTED", str(last.get("reason") or "killed"), "infrastructure", ""
