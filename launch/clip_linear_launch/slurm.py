"""Submitting runs to Slurm through submitit, so that a launcher killed at any moment leaves nothing in doubt.

Before sbatch, an intent (which runs, in which order) is written under a fresh token that is also the job's name;
after it, the job id. An intent without a job id is settled by the next `run`: a job of that name is adopted.
submitit only writes the script and the pickles; nothing of its results is ever read.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clip_linear.errors import RunError, UserError
from clip_linear.files import write_json
from clip_linear_launch import actions, rundir, sbatch, scheduler
from clip_linear_launch.expand import Run
from clip_linear_launch.sweep import Sweep

Say = Callable[[str], None]


class Worker:
    """What submitit pickles: nothing but the run's folder. In the job it becomes the worker."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir

    def __call__(self) -> None:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "clip_linear_launch.worker", self.run_dir])

    def checkpoint(self) -> Any:
        """submitit asks for this when a signal comes before the exec; the same worker starts again."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def submit_due(
    sweep: Sweep,
    runs: list[Run],
    say: Say,
    retry_failed: bool = False,
    resubmit: bool = False,
    only_failed: bool = False,
) -> int:
    """Submit what is due and return at once; 0, or 1 when Slurm took only a part."""
    if shutil.which("sbatch") is None:
        raise UserError('no sbatch on the PATH; use backend = "local", or run this on a login node')
    with _submitting(sweep.folder):
        settle(sweep, say)
        by_id = {r.run_id: r for r in runs}
        folders = [rundir.folder(sweep.folder, i) for i in by_id]
        due, seen = actions.due(folders, sweep.limits.max_retries, retry_failed, resubmit)
        if only_failed:
            failed = {s.run_id for s in seen if s.state in ("FAILED", "INTERRUPTED")}
            due = [f for f in due if f.name in failed]
        say(actions.summary(seen, len(due)))
        groups = sbatch.groups(sweep, [by_id[f.name] for f in due])
        actions.clear_end(due)
        avoid = bad_nodes(due)
        size = sbatch.max_array_size()
        waiting = [part for group in groups for part in sbatch.split(group, size)]
        while waiting:
            part = waiting.pop(0)
            try:
                _submit(sweep, part, avoid, say)
            except Refused as refusal:
                if avoid:  # perhaps there are no other nodes
                    avoid = []
                    waiting.insert(0, part)
                elif not refusal.is_submit_limit:
                    raise
                elif len(part) > 1:  # an array counts with all its elements
                    waiting = [*sbatch.split(part, -(-len(part) // 2)), *waiting]
                else:
                    left = sum(map(len, waiting)) + 1
                    say(f"{refusal}; {left} runs wait: the same command submits them when others have ended")
                    return 1
    return 0


class Refused(UserError):
    """Slurm did not take a submission."""

    @property
    def is_submit_limit(self) -> bool:
        """Whether there are only too many jobs already."""
        said = str(self).lower()
        return ("submit" in said and "limit" in said) or "temporarily unable to accept job" in said


@contextlib.contextmanager
def _submitting(sweep_folder: Path) -> Iterator[None]:
    """One submission at a time for a sweep."""
    with open(sweep_folder / ".submit.lock", "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError("another `launch run` is submitting this sweep right now; wait for it") from None
        yield


def _submit(sweep: Sweep, part: list[Run], exclude: list[str], say: Say) -> None:
    token = uuid.uuid4().hex[:8]
    name = f"clip-{sweep.head.name}-{token}"
    intent: dict[str, Any] = {
        "token": token,
        "name": name,
        "t": time.time(),
        "runs": [r.run_id for r in part],
        "job": None,
    }
    path = sweep.folder / "submits" / f"{token}.json"
    write_json(path, intent)
    resources = part[0].resources
    folders = [rundir.folder(sweep.folder, r.run_id) for r in part]
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    # submitit copies sbatch's complaint to our stderr; it is told once, in the error.
    with _environment(scheduler.clean_env()), contextlib.redirect_stderr(io.StringIO()):
        # A folder that is there already: with submitit's usual %j it would be made only after sbatch, and a job whose
        # output has no folder ends before it has begun.
        folder = _pickles(sweep, token)
        folder.mkdir(parents=True)
        executor = SlurmExecutor(folder=folder, python=sbatch.python(resources))
        executor.update_parameters(**sbatch.parameters(sweep, resources, name, exclude))
        try:
            with executor.batch():
                jobs = [executor.submit(Worker(str(folder))) for folder in folders]
        except (FailedJobError, FailedSubmissionError) as error:
            path.unlink()
            shutil.rmtree(folder)
            raise _refused(error, part) from None
    record(sweep.folder, intent, [job.job_id for job in jobs])
    first, last = jobs[0].job_id, jobs[-1].job_id
    say(f"submitted {len(part)} runs as job {first}" + (f" to {last}" if len(jobs) > 1 else ""))


def record(sweep_folder: Path, intent: dict[str, Any], jobs: list[str]) -> None:
    """Write each run's job id, then the intent's: an intent with a job id needs no settling."""
    for run_id, job in zip(intent["runs"], jobs):
        folder = rundir.folder(sweep_folder, run_id)
        before = rundir.read(folder / rundir.SUBMITTED)
        if before.get("job") == job:  # written by the launcher whose job is adopted
            continue
        started = any(r.get("job") == before.get("job") for r in rundir.attempts(folder))
        unstarted = 0 if not before or started else int(before.get("unstarted") or 0) + 1
        write_json(
            folder / rundir.SUBMITTED, {"job": job, "t": intent["t"], "name": intent["name"], "unstarted": unstarted}
        )
    write_json(sweep_folder / "submits" / f"{intent['token']}.json", intent | {"job": jobs[0].split("_")[0]})


def settle(sweep: Sweep, say: Say) -> None:
    """Adopt the jobs of a launcher that was killed between sbatch and writing down the job id.

    Raises RunError when Slurm does not say whether there are any: submitting again might run them twice.
    """
    open_intents = [
        intent
        for path in sorted((sweep.folder / "submits").glob("*.json"))
        if (intent := rundir.read(path)) and intent.get("job") is None
    ]
    if not open_intents:
        return
    queue = scheduler.queued()
    if queue is None:
        raise RunError(
            "an earlier `launch run` was killed while it submitted, and squeue does not answer; try again later"
        )
    by_name: dict[str, str] = {}
    for job_id, job in queue.items():
        by_name[job.name] = job_id.split("_")[0]
    for intent in open_intents:
        adopted = by_name.get(intent["name"])
        path = sweep.folder / "submits" / f"{intent['token']}.json"
        if adopted is None:
            path.unlink()
            continue
        many = len(intent["runs"]) > 1
        jobs = [f"{adopted}_{i}" if many else adopted for i in range(len(intent["runs"]))]
        for run_id, job_id in zip(intent["runs"], jobs):
            _write_pickle(_pickles(sweep, intent["token"]), job_id, rundir.folder(sweep.folder, run_id))
        record(sweep.folder, intent, jobs)
        say(f"adopted job {adopted}, which an interrupted `launch run` had submitted ({len(intent['runs'])} runs)")


def _pickles(sweep: Sweep, token: str) -> Path:
    return sweep.folder / "submitit" / token


def _write_pickle(folder: Path, job_id: str, run_dir: Path) -> None:
    """The pickle that a killed launcher had not yet moved to where the job waits for it (for a minute)."""
    from submitit.core.utils import DelayedSubmission, JobPaths

    path = JobPaths(folder, job_id=job_id).submitted_pickle
    if not path.exists():
        DelayedSubmission(Worker(str(run_dir))).dump(path)


def bad_nodes(folders: list[Path]) -> list[str]:
    """Nodes that failed the runs which are about to be retried: they are retried elsewhere."""
    found = []
    for folder in folders:
        rows = rundir.attempts(folder)
        if rows and rows[-1].get("class") == "infrastructure" and rows[-1].get("job"):
            found.append(str(rows[-1].get("node") or ""))
    return sorted({node for node in found if node and "[" not in node and "," not in node})


def scancel(jobs: list[str]) -> None:
    """Cancel jobs, in as few calls as possible. Raises RunError when Slurm refuses."""
    for start in range(0, len(jobs), 200):
        try:
            done = subprocess.run(
                ["scancel", *jobs[start : start + 200]],
                capture_output=True,
                text=True,
                timeout=60,
                env=scheduler.clean_env(),
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunError(
                f"scancel failed ({error}); the runs are marked cancelled and will not be resubmitted"
            ) from None
        said = [line for line in done.stderr.splitlines() if "Invalid job id" not in line and line.strip()]
        if done.returncode and said:
            raise RunError(f"scancel: {said[0]}; the runs are marked cancelled and will not be resubmitted")


@contextlib.contextmanager
def _environment(env: dict[str, str]) -> Iterator[None]:
    """submitit starts sbatch with this process's environment."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _refused(error: Exception, part: list[Run]) -> Refused:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if line.startswith("sbatch: error:")]
    said = "; ".join(line.removeprefix("sbatch: error: ") for line in named) or (lines[-1] if lines else "")
    return Refused(f"Slurm refused {part[0].run_id} and {len(part) - 1} others: {said}")
