"""Takes a rank down when another one has died, so that no job holds its nodes while its ranks wait for a dead one.

Between hosts a dead rank shows as a closed connection or, if it could still write, as failed.json. On one host its
process is looked at as well: a collective on a GPU may otherwise wait for a killed neighbour until its time-out.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from pathlib import Path
from typing import Any

from clip_linear.errors import RunError
from clip_linear.train.folder import FAILED, write_failed

log = logging.getLogger(__name__)
LOOK_S = 3.0
GRACE_S = 10.0  # for this rank to see the failure by itself and say so with its own traceback


class Watch:
    """A daemon thread over the table that ``World.preflight`` returned. ``stop`` before ranks may end on their own."""

    def __init__(self, run_dir: Path, table: list[dict[str, Any]], rank: int) -> None:
        here = socket.gethostname()
        self.run_dir, self.rank = run_dir, rank
        self.neighbours = {r["rank"]: r["pid"] for r in table if r["host"] == here and r["rank"] != rank}
        # An earlier attempt's failed.json may still be seen for a while on a network file system.
        self._before = _stamp(run_dir / FAILED)
        self._stop = threading.Event()
        if len(table) > 1:
            threading.Thread(target=self._run, name="watch", daemon=True).start()

    def stop(self) -> None:
        """End watching."""
        self._stop.set()

    def dead(self) -> list[int]:
        """Ranks on this host whose process has gone."""
        return [rank for rank, pid in self.neighbours.items() if not is_alive(pid)]

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            dead = self.dead()
            if dead or _stamp(self.run_dir / FAILED) not in (0, self._before):
                if self._stop.wait(GRACE_S):
                    return
                if dead:
                    error = RunError(f"Connection closed by peer: rank {dead[0]} is dead")
                    write_failed(self.run_dir, error, dead[0], None)
                    log.error("%s", error)
                log.error("rank %d ends with the rank that failed, see %s", self.rank, self.run_dir / FAILED)
                logging.shutdown()
                os._exit(1)


def _stamp(path: Path) -> int:
    """When a file was written; 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
