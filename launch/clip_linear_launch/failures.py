"""What an attempt's end means: done, continue, stopped, an error of the run, or a fault of the machines."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clip_linear_launch import rundir

CONTINUE, STOPPED = 75, 143
ATTEMPT_MARK = "--- attempt "  # begins the line before each attempt's output in log/rank-R.log
_TAIL_BYTES = 16_384
# Said by a trainer that found its network, node or port at fault; its own code is not to blame, so a retry may help.
_INFRASTRUCTURE = re.compile(
    r"EADDRINUSE|[Aa]ddress already in use|connectFullMesh|Connection (?:closed|reset|refused) by peer|"
    r"Connection reset|NCCL (?:error|WARN)|ncclSystemError|ncclInternalError|ncclRemoteError|unhandled cuda error|"
    r"CUDA error: (?:uncorrectable ECC|unspecified launch)|Bus error|Stale file handle|Input/output error|"
    r"DistNetworkError|DistStoreError|No route to host|Transport endpoint"
)


@dataclass(frozen=True)
class Verdict:
    """``kind``: done | timeout | stopped | error | infrastructure; the exit code that says it; and why in words."""

    kind: str
    exit: int
    reason: str


def worst(codes: list[int]) -> int:
    """One exit code for several ranks: an error before a kill, a kill before "continue", that before success."""
    for bad in (lambda c: c > 0 and c not in (CONTINUE, STOPPED), lambda c: c < 0, lambda c: c == CONTINUE):
        for code in codes:
            if bad(code):
                return code
    return next((c for c in codes if c), 0)


def judge(run_dir: Path, code: int, asked: int | None, rank: int) -> Verdict:
    """The verdict on an attempt from its exit code (negative: killed by that signal) and the signal that was sent."""
    if code == 0 and rank != 0:
        return Verdict("done", 0, "")
    if code == 0 and (run_dir / rundir.DONE).exists():
        return Verdict("done", 0, "")
    if code in (CONTINUE, -signal.SIGUSR2):
        return Verdict("timeout", CONTINUE, "time limit or preemption (SIGUSR2)")
    if asked == signal.SIGUSR2 and code in (STOPPED, -signal.SIGTERM, -signal.SIGKILL):
        return Verdict("timeout", STOPPED, "time limit or preemption; ended before it had saved")
    if code in (STOPPED, -signal.SIGTERM) or (code < 0 and asked == signal.SIGTERM):
        return Verdict("stopped", STOPPED, "stopped by SIGTERM")
    tail = log_tail(run_dir, rank)
    if code == 0:
        return Verdict("error", 1, "the command ended with code 0 but wrote no done.json")
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        if name in ("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE"):
            return Verdict("error", 128 - code, f"killed by {name}")
        return Verdict("infrastructure", 128 - code, f"killed by {name}" + (" (out of memory?)" if code == -9 else ""))
    found = rundir.read(run_dir / rundir.FAILED)
    reason = str(found.get("reason") or found.get("error") or "") or last_line(tail) or f"exit code {code}"
    kind = "infrastructure" if _INFRASTRUCTURE.search(tail) else "error"
    return Verdict(kind, 1, reason)


def progress(
    verdict: Verdict, run: dict[str, Any], rows: list[dict[str, Any]], start_step: int, end_step: int
) -> Verdict:
    """A time-out becomes an error when too many in a row brought no step: the run would loop for ever."""
    if verdict.kind != "timeout" or end_step > start_step:
        return verdict
    allowed = int(run.get("limits", {}).get("max_timeouts") or 2)
    idle = 1
    for row in reversed(rows):
        if row.get("class") != "timeout" or (row.get("end_step") or 0) > (row.get("start_step") or 0):
            break
        idle += 1
    if idle < allowed:
        return verdict
    return Verdict(
        "error",
        1,
        f"no progress: {idle} time-outs in a row at step {end_step}; "
        "raise [resources] time, or save more often, or lower [limits] signal_delay_s",
    )


def log_tail(run_dir: Path, rank: int) -> str:
    """The last lines that this attempt's trainer wrote."""
    try:
        with open(run_dir / "log" / f"rank-{rank}.log", "rb") as f:
            f.seek(0, 2)
            f.seek(max(0, f.tell() - _TAIL_BYTES))
            text = f.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(f"\n{ATTEMPT_MARK}")[2]


def last_line(text: str) -> str:
    """The last line that says anything, for a table; shortened."""
    lines = [line.strip() for line in text.splitlines()[1:] if line.strip()]
    return lines[-1][:300] if lines else ""
