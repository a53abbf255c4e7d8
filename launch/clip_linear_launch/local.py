"""The embedded queue: ``max_parallel`` runs at a time on this machine, each by the worker that Slurm starts too."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clip_linear.errors import UserError
from clip_linear.provenance import available_cores
from clip_linear_launch import rundir, scheduler, spec
from clip_linear_launch.failures import CONTINUE, STOPPED

_POLL_S = 0.1
_GRACE_S = 30.0  # from TERM at the time limit to KILL, as Slurm's KillWait
_PROGRESS_S = 15.0


@dataclass
class Running:
    """A run that this queue has started."""

    folder: Path
    process: subprocess.Popen[bytes]
    started: float
    time_s: int | None
    delay_s: int
    sent: list[int] = field(default_factory=list)

    def send(self, number: int) -> None:
        """Send a signal once; KILL to the whole process group, all others to the worker, which passes them on."""
        if number in self.sent:
            return
        self.sent.append(number)
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)

    def keep_time(self) -> None:
        """What Slurm does: USR2 ``signal_delay_s`` before the limit, TERM at it, KILL half a minute later."""
        if self.time_s is None:
            return
        elapsed = time.monotonic() - self.started
        if elapsed > self.time_s + _GRACE_S:
            self.send(signal.SIGKILL)
        elif elapsed > self.time_s:
            self.send(signal.SIGTERM)
        elif elapsed > self.time_s - self.delay_s:
            self.send(signal.SIGUSR2)


@contextlib.contextmanager
def only_queue(sweep_folder: Path) -> Iterator[None]:
    """Hold the sweep's queue lock. Raises UserError when another queue works on this sweep."""
    sweep_folder.mkdir(parents=True, exist_ok=True)
    with open(sweep_folder / ".queue.lock", "a+") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            f.seek(0)
            raise UserError(
                f"a local queue (pid {f.read().strip()}) already works on this sweep; run: clip-linear launch status"
            ) from None
        f.truncate(0)
        f.write(str(os.getpid()))
        f.flush()
        yield


class Queue:
    """Runs folders in order. ``say`` gets a line at each start and end, ``show`` the progress now and then."""

    def __init__(
        self,
        folders: list[Path],
        limits: spec.Limits,
        say: Callable[[str], None],
        show: Callable[[str], None] | None = None,
    ) -> None:
        self.waiting = list(folders)
        self.total = len(folders)
        self.limits = limits
        self.say, self.show = say, show or say
        self.running: list[Running] = []
        self.ended: dict[str, list[Path]] = {"done": [], "failed": [], "stopped": []}
        self.stops = 0

    def run(self) -> dict[str, list[Path]]:
        """Work until nothing waits and nothing runs, or until told to stop; returns the folders by how they ended."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {n: signal.signal(n, self._stop) for n in numbers}
        next_show = time.monotonic() + _PROGRESS_S
        try:
            while self.running or (self.waiting and not self.stops):
                while self.waiting and not self.stops and len(self.running) < self.limits.max_parallel:
                    self._start(self.waiting.pop(0))
                for job in list(self.running):
                    if job.process.poll() is None:
                        job.keep_time()
                    else:
                        self.running.remove(job)
                        self._end(job)
                if time.monotonic() > next_show:
                    next_show = time.monotonic() + _PROGRESS_S
                    self.show(self._progress())
                time.sleep(_POLL_S)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for job in self.running:
                job.send(signal.SIGKILL)
        return self.ended

    def _stop(self, number: int, frame: Any) -> None:
        self.stops += 1
        for job in self.running:
            job.send(signal.SIGTERM if self.stops == 1 else signal.SIGKILL)

    def _start(self, folder: Path) -> None:
        (folder / rundir.SUBMITTED).unlink(missing_ok=True)  # an ended job of Slurm has no more say
        run = rundir.read(folder / rundir.RUN)
        resources = run.get("resources", {})
        cores = available_cores()
        threads = min(resources.get("cpus_per_task") or cores, max(1, cores // self.limits.max_parallel))
        # A queue inside a Slurm job is local all the same: its runs must not take the job for theirs.
        environment = scheduler.clean_env() | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        process = subprocess.Popen(
            [sys.executable, "-m", "clip_linear_launch.worker", str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        limit = resources.get("time")
        time_s = None if limit is None else spec.seconds(limit)
        self.running.append(Running(folder, process, time.monotonic(), time_s, self.limits.signal_delay_s))
        at = rundir.step(folder)
        self.say(f"{self._count()} start {folder.name}" + (f" (continues at step {at})" if at else ""))

    def _count(self) -> str:
        return f"[{sum(map(len, self.ended.values()))}/{self.total}]"

    def _end(self, job: Running) -> None:
        code = job.process.returncode
        if code == 0:
            self.ended["done"].append(job.folder)
            self.say(f"{self._count()} done  {job.folder.name} in {time.monotonic() - job.started:.0f} s")
        elif (code == CONTINUE or (code == STOPPED and signal.SIGUSR2 in job.sent)) and not self.stops:
            self.waiting.insert(0, job.folder)
            self.say(f"{self._count()} time limit: {job.folder.name} continues from step {rundir.step(job.folder)}")
        elif code in (CONTINUE, STOPPED):
            self.ended["stopped"].append(job.folder)
            self.say(f"{self._count()} stopped {job.folder.name} at step {rundir.step(job.folder)}")
        else:
            self._failed(job.folder, code)

    def _failed(self, folder: Path, code: int) -> None:
        failed = rundir.read(folder / rundir.FAILED)
        faults = rundir.faults_in_a_row(rundir.attempts(folder))
        infrastructure = failed.get("class", "infrastructure") == "infrastructure"
        if infrastructure and faults <= self.limits.max_retries and not self.stops:
            self.waiting.append(folder)
            self.say(f"{self._count()} retry {folder.name}: {failed.get('reason', f'exit code {code}')}")
            return
        self.ended["failed"].append(folder)
        self.say(f"{self._count()} FAILED {folder.name}: {failed.get('reason', f'exit code {code}')}")

    def _progress(self) -> str:
        parts = []
        for job in self.running:
            beat = rundir.read(job.folder / rundir.STATE)
            steps = rundir.read(job.folder / rundir.RUN).get("steps")
            rate = f", {beat['samples_per_s']:.0f} samples/s" if beat.get("samples_per_s") else ""
            loss = f", loss {beat['loss']:.3f}" if beat.get("loss") is not None else ""
            parts.append(f"{job.folder.name} {beat.get('step') or 0}/{steps}{loss}{rate}")
        return f"{self._count()} " + " · ".join(parts)
