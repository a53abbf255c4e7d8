"""Faults told to the user: rows in ``data_faults.jsonl``, a line per kind on the console, an end to too many."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clip_linear.data.faults import Fault, costs_a_sample
from clip_linear.data.state import add_up
from clip_linear.errors import RunError
from clip_linear.files import append_jsonl, locked, read_jsonl, replacing

log = logging.getLogger(__name__)
MAX_ROWS = 100_000  # of all ranks together


class FaultLog:
    """Counts and writes this rank's faults, each once however many passes meet it.

    After a restart it drops the rows that were written after the checkpoint and remembers the others. What is not
    remembered (beyond ``limit`` faults) is counted at every meeting and not written.
    """

    def __init__(self, path: Path | None, rank: int, world_size: int, saved: Mapping[str, Mapping[str, Any]]) -> None:
        self.path, self.rank = path, rank
        self.limit = max(1000, MAX_ROWS // world_size)
        own = saved.get(str(rank), {"rows": 0, "counts": {}})
        self.rows: int = own["rows"]
        self.counts: dict[str, int] = dict(own["counts"])
        # Where there are fewer ranks than before, rank 0 goes on with the counts of those that are gone.
        self.former = {r: s for r, s in saved.items() if rank == 0 and int(r) >= world_size}
        for each in self.former.values():
            self.counts = add_up([self.counts, each["counts"]])
        self.kinds: set[str] = set()
        self.known: set[str] = set()
        if path is not None and path.exists():
            with locked(path.parent):
                kept = _cut_back(path, rank, world_size, {r: s["rows"] for r, s in saved.items()})
            self.known = {_name(row) for row in kept if row["rank"] == rank}

    def saved(self) -> dict[str, dict[str, Any]]:
        """What a checkpoint keeps of this rank: rank -> its rows in the file, and its counts."""
        former = {r: {"rows": s["rows"], "counts": {}} for r, s in self.former.items()}
        return {**former, str(self.rank): {"rows": self.rows, "counts": self.counts}}

    def take(self, faults: Sequence[Fault]) -> None:
        """Take in the faults of one batch."""
        rows = []
        counts = dict(self.counts)
        for fault in faults:
            row = fault.row(self.rank)
            name = _name(row)
            if name in self.known:
                continue
            counts[fault.reason] = counts.get(fault.reason, 0) + 1
            if len(self.known) < self.limit:
                self.known.add(name)
                rows.append(row)
            self._tell(row)
        self.counts = dict(sorted(counts.items()))
        self.rows += len(rows)
        if self.path is not None and rows:
            with locked(self.path.parent):
                append_jsonl(self.path, *rows)

    def _tell(self, row: Mapping[str, Any]) -> None:
        """One line for the first fault of a kind."""
        if row["reason"] not in self.kinds:
            self.kinds.add(row["reason"])
            where = row["shard"] + (f" key {row['key']}" if row["key"] is not None else "")
            log.warning("data: %s, first in %s (%s)", row["reason"], where, row["detail"])

    def close(self, delivered: Mapping[str, int]) -> None:
        """One line with the count of every kind, and one with the samples of each source if there are several."""
        if self.rank == 0 and self.counts:
            log.warning("data: lost or odd: %s", ", ".join(f"{reason} ×{n}" for reason, n in self.counts.items()))
        if self.rank == 0 and len(delivered) > 1:
            log.info("data: samples by source: %s", ", ".join(f"{s}: {n}" for s, n in delivered.items()))


def _name(row: Mapping[str, Any]) -> str:
    """The same for the same fault in every pass, though its detail may come in other words."""
    parts = [row["reason"], row["shard"], row["key"], row["offset"]]
    if row["reason"] == "duplicate_key":  # the one fault of which a sample may have several
        parts.append(row["detail"])
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()


def _cut_back(path: Path, rank: int, world_size: int, rows: Mapping[str, int]) -> list[dict[str, Any]]:
    """Keep the first ``rows[r]`` rows of each rank r that is this one's to care for (0 also cares for former ranks)."""
    kept: list[dict[str, Any]] = []
    counts: dict[int, int] = {}
    found = read_jsonl(path)
    for row in found:
        owner = row.get("rank", -1)
        counts[owner] = counts.get(owner, 0) + 1
        is_mine = owner == rank or (rank == 0 and owner >= world_size)
        if not is_mine or counts[owner] <= rows.get(str(owner), 0):
            kept.append(row)
    if kept != found:
        with replacing(path) as tmp:
            append_jsonl(tmp, *kept)
    return kept


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
