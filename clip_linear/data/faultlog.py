"""Faults told to the user: rows in ``data_faults.jsonl``, a line per kind on the console, an end to too many."""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clip_linear.data.faults import Fault, costs_a_sample
from clip_linear.errors import RunError
from clip_linear.files import append_jsonl, locked, replacing

log = logging.getLogger(__name__)


class FaultLog:
    """Writes this rank's rows; after a restart first drops those written after the checkpoint."""

    def __init__(self, path: Path | None, rank: int, world_size: int, rows: Mapping[str, int]) -> None:
        self.path, self.rank = path, rank
        self.written = rows.get(str(rank), 0)
        self.seen: set[str] = set()
        if path is not None and path.exists():
            with locked(path.parent):
                _cut_back(path, rank, world_size, rows)

    def write(self, faults: Sequence[Fault]) -> int:
        """Write the faults of one batch; returns the number of this rank's rows in the file."""
        for fault in faults:
            if fault.reason not in self.seen:
                self.seen.add(fault.reason)
                where = fault.shard + (f" key {fault.key}" if fault.key is not None else "")
                log.warning("data: %s, first in %s (%s)", fault.reason, where, fault.detail)
        if self.path is not None and faults:
            with locked(self.path.parent):
                append_jsonl(self.path, *(f.row(self.rank) for f in faults))
        self.written += len(faults)
        return self.written

    def close(self, faults: Mapping[str, int], delivered: Mapping[str, int]) -> None:
        """One line with the count of every kind, and one with the samples of each source if there are several."""
        if self.rank == 0 and faults:
            log.warning("data: lost or odd: %s", ", ".join(f"{reason} ×{n}" for reason, n in faults.items()))
        if self.rank == 0 and len(delivered) > 1:
            log.info("data: samples by source: %s", ", ".join(f"{s}: {n}" for s, n in delivered.items()))


def _cut_back(path: Path, rank: int, world_size: int, rows: Mapping[str, int]) -> None:
    """Keep the first ``rows[r]`` rows of each rank r that is this one's to care for (0 also cares for former ranks)."""
    kept: list[str] = []
    counts: dict[int, int] = {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for line in lines:
        try:
            owner = int(json.loads(line)["rank"])
        except (ValueError, KeyError, TypeError):
            continue
        counts[owner] = counts.get(owner, 0) + 1
        is_mine = owner == rank or (rank == 0 and owner >= world_size)
        if not is_mine or counts[owner] <= rows.get(str(owner), 0):
            kept.append(line)
    if kept != lines:
        with replacing(path) as tmp:
            tmp.write_text("".join(kept), encoding="utf-8")


class RateLimit:
    """Ends a run whose data are worse than ``max_rate``.

    Over the last 10,000 groups read the rate itself decides. With fewer (but 100) the lower end of its two-sigma Wilson
    interval does (Wilson 1927, doi:10.1080/01621459.1927.10502953), so that a bad start alone ends nothing.
    """

    WINDOW = 10_000
    LEAST = 100

    def __init__(self, max_rate: float, streams: Mapping[str, Mapping[str, Any] | None]) -> None:
        self.max_rate = max_rate
        self.before = {name: _read_and_bad(state) for name, state in streams.items() if state is not None}
        self.parts: deque[tuple[int, int]] = deque()
        self.groups = self.bad = 0

    def check(self, stream: str, state: Mapping[str, Any], faults: Mapping[str, int]) -> None:
        """Take in what a stream has read by now. Raises RunError with a table of the faults."""
        groups, bad = _read_and_bad(state)
        had = self.before.get(stream, (0, 0))
        self.before[stream] = (groups, bad)
        self.parts.append((groups - had[0], bad - had[1]))
        self.groups += groups - had[0]
        self.bad += bad - had[1]
        while self.groups - self.parts[0][0] >= self.WINDOW:
            old = self.parts.popleft()
            self.groups -= old[0]
            self.bad -= old[1]
        if self.groups >= self.LEAST and self._rate() > self.max_rate:
            table = "".join(f"\n  {reason:<24} {n}" for reason, n in faults.items())
            raise RunError(
                f"{self.bad} of the last {self.groups} samples are bad ({100 * self.bad / self.groups:.1f} %), "
                f"more than --max-fault-rate {self.max_rate:g} allows; see data_faults.jsonl, then mend the shards "
                f"or allow more.{table}"
            )

    def _rate(self) -> float:
        rate, n, z = self.bad / self.groups, self.groups, 2.0
        if n >= self.WINDOW:
            return rate
        spread = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
        return (rate + z * z / (2 * n) - spread) / (1 + z * z / n)


def _read_and_bad(state: Mapping[str, Any]) -> tuple[int, int]:
    return state["groups"], sum(n for reason, n in state["faults"].items() if costs_a_sample(reason))
