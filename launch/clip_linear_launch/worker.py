"""The one command that runs a run: ``python -m clip_linear_launch.worker RUN``, for the local queue and for Slurm.

It starts the run's command (from run.json), passes signals on, records the attempt and decides what comes next.
Exit codes: 0 done (or nothing to do), 75 continue me, 143 told to stop, 1 failed, 128 + n killed by signal n.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from clip_linear_launch import failures, preflight, ranks, requeue, rundir
from clip_linear_launch.failures import CONTINUE

_PR_SET_PDEATHSIG = 1
_NOT_STARTED = 127
Processes = list[subprocess.Popen[bytes]]


class Stop:
    """What the outside has asked for. USR2: the time limit is near; TERM (and INT): save and go."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self.children: Processes = []
        # Slurm signals every process of the step, so the trainer has it already; a second one would end it at once.
        self.forwards = "SLURM_STEP_ID" not in os.environ
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        number = signal.SIGTERM if number == signal.SIGINT else number
        self.asked = self.asked or number
        if self.forwards:
            for child in self.children:
                with contextlib.suppress(ProcessLookupError):
                    child.send_signal(number)


def main(argv: list[str] | None = None) -> int:
    """Run the run in the folder ``argv[0]``; returns the exit code."""
    args = sys.argv[1:] if argv is None else argv
    if len(args) != 1 or not (Path(args[0]) / rundir.RUN).is_file():
        sys.stderr.write("usage: python -m clip_linear_launch.worker RUN (a folder with run.json)\n")
        return 2
    run_dir = Path(args[0]).resolve()
    stop = Stop()
    run = rundir.read(run_dir / rundir.RUN)
    task = ranks.here()
    with _alone(run_dir, task) as lock:
        if lock is None:
            sys.stderr.write(f"{run_dir.name}: another worker holds this run\n")
            return CONTINUE
        if (run_dir / rundir.DONE).exists() or (run_dir / rundir.CANCELLED).exists():
            return 0
        return (_first if task.rank == 0 else _other)(run_dir, run, task, stop, lock)


@contextlib.contextmanager
def _alone(run_dir: Path, task: ranks.Task) -> Iterator[tuple[int, ...] | None]:
    """Hold the run's lock (first rank only) while the block runs; None when somebody else keeps it.

    The descriptor is given to the trainer too: should this worker be killed, the lock lives as long as the trainer.
    """
    if task.rank != 0:
        yield ()
        return
    with open(run_dir / rundir.LOCK, "a") as f:
        # A requeued job may start while the last process of its former life is still dying.
        deadline = time.monotonic() + (60.0 if task.job else 15.0)
        while True:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    yield None
                    return
                time.sleep(0.1)
            except OSError:  # a file system without locks: the scheduler alone keeps the workers of a run apart
                break
        f.truncate(0)
        f.write(f"{socket.gethostname()} {os.getpid()}")
        f.flush()
        yield (f.fileno(),)


def _first(run_dir: Path, run: dict[str, Any], task: ranks.Task, stop: Stop, lock: tuple[int, ...]) -> int:
    """The worker of rank 0: it keeps the record and requeues."""
    rows = rundir.close_last_attempt(run_dir)
    number = len(rows) + 1
    start_step = rundir.step(run_dir)
    rundir.record_attempt(
        run_dir, attempt=number, start=time.time(), start_step=start_step, host=socket.gethostname(), **task.record()
    )
    code = _train(run_dir, run, task, stop, lock)
    end_step = rundir.step(run_dir)
    start_step = int(rundir.read(run_dir / rundir.STATE).get("start_step", start_step))  # where the trainer resumed
    verdict = failures.judge(run_dir, code, stop.asked, task.rank)
    verdict = failures.progress(verdict, run, rows, start_step, end_step)
    rundir.record_attempt(
        run_dir,
        attempt=number,
        end=time.time(),
        start_step=start_step,
        end_step=end_step,
        exit=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        node=task.node,
        **{"class": verdict.kind, "reason": verdict.reason},
    )
    saved = max((int(r.get("end_step") or 0) for r in rows if r.get("class") in ("timeout", "stopped")), default=0)
    if end_step < saved:
        sys.stderr.write(
            f"WARNING {run_dir.name}: an earlier attempt had saved step {saved}, this one ended at step {end_step}: "
            "was the run's folder cleaned, or is it not shared between the nodes?\n"
        )
    if verdict.kind in ("error", "infrastructure"):
        rundir.fail(run_dir, verdict.kind, verdict.reason, rank=0, node=task.node, exit=code)
    elif verdict.exit == CONTINUE and not (run_dir / rundir.CANCELLED).exists():
        return 0 if requeue.requeue(task.job) else CONTINUE
    return verdict.exit


def _other(run_dir: Path, run: dict[str, Any], task: ranks.Task, stop: Stop, lock: tuple[int, ...]) -> int:
    """The worker of another rank: it only says what went wrong, if it was the first to see it."""
    code = _train(run_dir, run, task, stop, lock)
    verdict = failures.judge(run_dir, code, stop.asked, task.rank)
    if verdict.kind in ("error", "infrastructure"):
        rundir.fail(run_dir, verdict.kind, verdict.reason, rank=task.rank, node=task.node, exit=code)
        return verdict.exit
    return 0  # kill-on-bad-exit must not shoot rank 0 while it saves


def _train(run_dir: Path, run: dict[str, Any], task: ranks.Task, stop: Stop, lock: tuple[int, ...]) -> int:
    """Run the command (as one process, or as all local ranks); returns its exit code, negative for a signal."""
    if stop.asked:
        return -stop.asked
    argv = [a.replace("{run_dir}", str(run_dir)) for a in run["argv"]]
    argv[0] = sys.executable if argv[0] == "python" else argv[0]
    (run_dir / "log").mkdir(exist_ok=True)
    starting = list(ranks.children(run_dir, run, task))
    warning = preflight.shared_memory(run, task.local_size if task.job else len(starting))
    for environment, rank in starting:
        with open(run_dir / "log" / f"rank-{rank}.log", "ab") as out:
            head = f"{failures.ATTEMPT_MARK}{time.strftime('%F %T')} {task.job or 'local'} on {task.node}"
            out.write(f"{head}: {' '.join(argv)}\n".encode())
            if warning:
                out.write(f"WARNING {warning}\n".encode())
            out.flush()
            try:
                process = subprocess.Popen(
                    argv,
                    env=environment,
                    cwd=run.get("cwd"),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    pass_fds=lock,
                    preexec_fn=_die_with_parent,
                )
            except OSError as error:  # the program or the folder to start in is not there (any more)
                out.write(f"cannot start {argv[0]} in {run.get('cwd')}: {error.strerror}\n".encode())
                return _NOT_STARTED
        stop.children.append(process)
        if stop.asked and stop.forwards:  # it came before there was anybody to forward it to
            process.send_signal(stop.asked)
    return _wait(stop.children)


def _die_with_parent() -> None:
    """In the trainer, before it starts: get TERM (save and go) when the worker is killed. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(children: Processes, patience_s: float = 10.0) -> int:
    """Wait for all ranks; when one fails the others get ``patience_s`` to end, then TERM, then KILL."""
    if len(children) == 1:
        return children[0].wait()
    deadline: float | None = None
    while any(c.poll() is None for c in children):
        if deadline is None and any(c.poll() not in (None, 0) for c in children):
            deadline = time.monotonic() + patience_s
        if deadline is not None and time.monotonic() > deadline:
            late = time.monotonic() > deadline + patience_s / 3
            for child in (c for c in children if c.poll() is None):
                child.send_signal(signal.SIGKILL if late else signal.SIGTERM)
            time.sleep(0.5)
        time.sleep(0.05)
    return failures.worst([c.wait() for c in children])


if __name__ == "__main__":
    sys.exit(main())
