"""What Slurm says of our jobs: one squeue and one sacct call for all of them, each with a time limit.

squeue is asked first and sacct's *last* row counts: after a requeue an old PREEMPTED or NODE_FAIL row stays behind.
Both may be missing or silent; the run folders decide then.
"""

from __future__ import annotations

import datetime
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

TIMEOUT_S = 20.0
_SCRUB = ("SLURM_", "SBATCH_", "SRUN_", "PMIX_", "PMI_", "SUBMITIT_")
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_RUNNING = ("RUNNING", "SUSPENDED", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED")
LIVE = frozenset((*_WAITING, *_RUNNING))
# The words for a moment of a job that Slurm is about to requeue, and for good of one that it is not.
_PASSING, _PASSING_S = ("NODE_FAIL", "PREEMPTED", "BOOT_FAIL"), 60.0


@dataclass(frozen=True)
class Job:
    """One job or array element: Slurm's state word, its reason, where it runs, its name."""

    state: str
    reason: str = ""
    node: str = ""
    name: str = ""

    @property
    def is_running(self) -> bool:
        """It holds its nodes."""
        return self.state in _RUNNING

    @property
    def is_live(self) -> bool:
        """It waits or runs, or will do so again by itself."""
        return self.state in LIVE


def clean_env() -> dict[str, str]:
    """This environment without what an enclosing job left in it (it would bend the new job), but with SLURM_CONF."""
    return {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or not k.startswith(_SCRUB)}


def ask(command: list[str]) -> str | None:
    """The output of a Slurm client, or None when it is not there, fails or does not answer in time."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode and "Invalid job id" in done.stderr:  # squeue's way to say: I have forgotten it
        return ""
    return done.stdout if done.returncode == 0 else None


def queued(jobs: Iterable[str] | None = None) -> dict[str, Job] | None:
    """squeue's jobs by id (``123`` or ``123_4``): those named, or all of this user. None: squeue does not answer."""
    names = None if jobs is None else sorted({j.split("_")[0] for j in jobs})
    if names is not None and not names:
        return {}
    which = ["--me"] if names is None else ["-j", ",".join(names)]
    # -r: one line for each element of an array, also for those that wait
    out = ask(["squeue", "-h", "-r", "-t", "all", "-o", "%i|%T|%r|%N|%j|%e", *which])
    if out is None:
        return None
    found = {}
    for line in out.splitlines():
        job, state, reason, node, name, end = [*line.split("|"), "", "", "", "", ""][:6]
        state = state.split()[0] if state else ""
        if state in _PASSING and _seconds_since(end) < _PASSING_S:
            state = "REQUEUED"
        found[job] = Job(state, "" if reason == "None" else reason, node, name)
    return found


def _seconds_since(end: str) -> float:
    """Since squeue's local time ``2026-11-29T21:30:05``; infinite for ``N/A`` and the like."""
    try:
        return (datetime.datetime.now() - datetime.datetime.fromisoformat(end)).total_seconds()
    except ValueError:
        return math.inf


def accounted(jobs: Iterable[str]) -> dict[str, Job]:
    """sacct's last word on each job; empty when there is no accounting."""
    names = sorted({j.split("_")[0] for j in jobs})
    if not names:
        return {}
    found = {}
    for start in range(0, len(names), 500):
        fields = "JobID,State,NodeList,JobName,ExitCode"
        out = ask(["sacct", "-n", "-X", "-P", "-D", "-o", fields, "-j", ",".join(names[start : start + 500])])
        for line in (out or "").splitlines():
            job, state, node, name, code = [*line.split("|"), "", "", "", "", ""][:5]
            reason = f"exit {code}" if state.startswith("FAILED") else state
            for one in _elements(job):
                found[one] = Job(state.split()[0] if state else "", reason, "" if "None" in node else node, name)
    return found


def _elements(job: str) -> list[str]:
    """``12_[0-2,5%4]`` (pending elements of an array, one row) → 12_0, 12_1, 12_2, 12_5."""
    match = re.fullmatch(r"(\d+)_\[([^\]%]+)(?:%\d+)?\]", job)
    if not match:
        return [job]
    out = []
    for part in match.group(2).split(","):
        low, _, high = part.partition("-")
        out += [f"{match.group(1)}_{i}" for i in range(int(low), int(high or low) + 1)]
    return out


def config() -> dict[str, str]:
    """``scontrol show config`` as a dict; empty without Slurm."""
    out = ask(["scontrol", "show", "config"]) or ""
    pairs = (line.partition("=") for line in out.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}
