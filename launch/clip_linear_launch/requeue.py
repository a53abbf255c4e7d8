"""Putting the own Slurm job back into the queue, from inside it."""

from __future__ import annotations

import subprocess
import sys


def requeue(job: str | None) -> bool:
    """Requeue a job (``123`` or ``123_4``); True when Slurm will start it again, False when nobody will.

    Slurm ends the step as soon as it hears of the requeue, and that TERM may hit the very ``scontrol`` that waits for
    the answer; a shell that ignores TERM passes that on through exec. A call that was killed all the same has been
    heard, and a job that is pending already needs nothing more.
    """
    if job is None:
        return False
    command = ["sh", "-c", 'trap "" TERM; exec scontrol requeue "$1"', "sh", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"could not requeue {job}: {error}\n")
        return False
    if done.returncode <= 0 or "pending execution" in done.stderr.lower():
        return True
    sys.stderr.write(f"could not requeue {job}: {done.stderr.strip() or done.returncode}; `launch run` continues it\n")
    return False
