"""One stream of batches: reads its units in order, shuffles encoded pairs, decodes what it draws, and knows its state.

A rank has one stream for each worker process (one without workers); each batch comes from one stream.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clip_linear.data.decode import BadImageError
from clip_linear.data.faults import SHARD_REASONS, Fault, costs_a_sample
from clip_linear.data.fetch import Store
from clip_linear.data.filters import Filter
from clip_linear.data.order import Unit, draw, drawn_unit, pass_units
from clip_linear.data.reader import Shard, describe, open_shard
from clip_linear.data.samples import Encoded
from clip_linear.data.shards import ShardList
from clip_linear.data.state import StreamState, copy_stream, fresh_pass

log = logging.getLogger(__name__)
# So many bad groups, or shards without any, and not one good sample: there is no need to go on.
_HOPELESS_GROUPS = 1000
_HOPELESS_SHARDS = 100


class NoSamplesError(Exception):
    """A pass yielded nothing; the text says what was found instead."""


@dataclass(frozen=True)
class StreamPlan:
    """What all streams of a run have in common."""

    shards: ShardList
    seed: int
    era: int  # grows with each change of layout, so that random draws do not repeat
    streams: int
    resampled: bool
    batch_size: int
    buffer_bytes: int
    caption_key: str | None
    filters: tuple[Filter, ...]


@dataclass(frozen=True)
class Prepared:
    """One pair, transformed (uint8 [H, W, 3] where the last steps are done with the batch, else a tensor)."""

    image: Any
    caption: str


class Stream:
    """Yields batches with the state after each. ``prepare(pair, key)`` decodes; it raises BadImageError."""

    def __init__(
        self,
        plan: StreamPlan,
        number: int,
        state: StreamState,
        prepare: Callable[[Encoded, str], Prepared],
        store: Store,
    ) -> None:
        self.plan = plan
        self.number = number
        self.state = copy_stream(state)
        self.prepare = prepare
        self.store = store
        self.rows: list[Fault] = []  # faults since the last batch
        self.extensions: Counter[str] = Counter()
        self.has_repeated = False  # a batch had to hold a sample twice
        self.shard: Shard | None = None
        self.units: list[Unit] = []
        self.units_pass = -1
        self.buffer: list[tuple[int, int, Encoded]] = []
        self.size = 0
        self._restore_buffer()

    def next_batch(self, is_last: bool = False) -> tuple[list[Prepared], StreamState, list[Fault]]:
        """The next batch, the state after it, and the faults met on the way. Raises NoSamplesError.

        With ``is_last``, what is left of the pass, if it is less than a batch, is looked at too: so a run of exactly
        one pass has counted everything.
        """
        batch: list[Prepared] = []
        held: set[tuple[int, int]] = set()
        while len(batch) < self.plan.batch_size:
            self._fill()
            if not self.buffer:
                self._next_pass()
                continue
            drawn = self._draw(held)
            if drawn is not None:
                batch.append(drawn)
        if is_last and self._unit() is None and len(self.buffer) < self.plan.batch_size:
            while self.buffer:
                self._draw(set())
        state = copy_stream(self.state)
        state["buffer"] = [number for shard, ordinal, _ in self.buffer for number in (shard, ordinal)]
        rows, self.rows = self.rows, []
        return batch, state, rows

    def _fill(self) -> None:
        """Read groups until the buffer is full or the pass is read (it is then emptied before the next begins)."""
        while self.size <= self.plan.buffer_bytes and (unit := self._unit()) is not None:
            shard = self._open(unit)
            ordinal = self.state["ordinal"]
            if ordinal >= len(shard.groups):
                self._leave()
                continue
            self.state["ordinal"] = ordinal + unit[2]
            self._read(unit[0], ordinal, shard)

    def _unit(self, ahead: int = 0) -> Unit | None:
        number = self.state["unit"] + ahead
        n_shards = len(self.plan.shards.urls)
        if self.plan.resampled:
            key = (self.plan.seed, self.plan.era, self.number, number)
            return drawn_unit(self.plan.shards.weights, n_shards, key)
        pass_ = self.state["pass"]
        if self.units_pass != pass_:
            self.units_pass = pass_
            planned = self.state["plans"].get(str(pass_))
            if planned is not None:
                self.units = [(u[0], u[1], u[2]) for u in planned]
            else:
                self.units = pass_units(n_shards, self.plan.seed, pass_, self.number, self.plan.streams)
        return self.units[number] if number < len(self.units) else None

    def _open(self, unit: Unit) -> Shard:
        if self.shard is None:
            self.shard = open_shard(self.plan.shards.urls[unit[0]], self.store)
            following = self._unit(ahead=1)
            if following is not None:
                self.store.prefetch(self.plan.shards.urls[following[0]])
            if self.state["ordinal"] < 0:
                self._enter(unit, self.shard)
        return self.shard

    def _enter(self, unit: Unit, shard: Shard) -> None:
        self.state["ordinal"] = unit[1]
        self.extensions += shard.extensions
        if unit[1] == 0:  # of the streams that share a shard one counts its own faults
            self._count(shard.faults)
        counts = self.state["this_pass"]
        counts["shards"] += 1
        counts["empty_shards"] += not shard.groups
        self._give_up_if_hopeless()

    def _leave(self) -> None:
        if self.shard is not None:
            self.shard.close()
        self.shard = None
        self.state["unit"] += 1
        self.state["ordinal"] = -1

    def _read(self, number: int, ordinal: int, shard: Shard) -> None:
        pair, faults = shard.read(ordinal, self.plan.caption_key, self.plan.filters)
        self.state["groups"] += 1
        self.state["this_pass"]["groups"] += 1
        self._count(faults)
        if pair is not None:
            self.buffer.append((number, ordinal, pair))
            self.size += pair.n_bytes
            return
        self.state["this_pass"]["unreadable"] += any(costs_a_sample(f.reason) for f in faults)
        self._give_up_if_hopeless()

    def _draw(self, held: set[tuple[int, int]]) -> Prepared | None:
        """Take a random pair out of the buffer, if possible one that this batch does not hold, and decode it."""
        n = self.state["draws"]
        self.state["draws"] = n + 1
        at = draw(self.plan.seed, self.plan.era, self.number, n) % len(self.buffer)
        for step in range(len(self.buffer)):
            other = (at + step) % len(self.buffer)
            if self.buffer[other][:2] not in held:
                at = other
                break
        else:
            self.has_repeated = True
        self.buffer[at], self.buffer[-1] = self.buffer[-1], self.buffer[at]
        number, ordinal, pair = self.buffer.pop()
        self.size -= pair.n_bytes
        held.add((number, ordinal))
        try:
            drawn = self.prepare(pair, f"{self.plan.seed}/{self.plan.era}/{self.number}/{n}")
        except BadImageError as error:
            self._count([Fault(error.reason, self.plan.shards.urls[number], pair.key, pair.offset, error.detail)])
            self.state["this_pass"]["undecodable"] += 1
            self._give_up_if_hopeless()
            return None
        self.state["this_pass"]["delivered"] += 1
        source = str(self.plan.shards.sources[number])
        self.state["delivered"][source] = self.state["delivered"].get(source, 0) + 1
        return drawn

    def _next_pass(self) -> None:
        """Begin the next pass. After one that yielded nothing, the next reads all shards, and is the last try."""
        state = self.state
        n_shards = len(self.plan.shards.urls)
        if not state["this_pass"]["delivered"]:
            if {u[0] for u in self.units if u[1:] == (0, 1)} == set(range(n_shards)):
                raise NoSamplesError(self._explain())
            # Nothing in its own part: another stream's shards may hold something. (A plan is what a restart left over.)
            if not state["plans"]:
                everything = pass_units(n_shards, self.plan.seed, state["pass"] + 1, 0, 1)
                state["plans"] = {str(state["pass"] + 1): [list(u) for u in everything]}
        state["plans"] = {p: units for p, units in state["plans"].items() if p != str(state["pass"])}
        state["pass"] += 1
        state["unit"], state["ordinal"] = 0, -1
        state["this_pass"] = fresh_pass()

    def _give_up_if_hopeless(self) -> None:
        """End early where going on to the end of the pass (or for ever, with replacement) would find nothing either."""
        counts = self.state["this_pass"]
        if counts["delivered"]:
            return
        bad = counts["undecodable"] if self.buffer else counts["unreadable"] + counts["undecodable"]
        seen_often = self.plan.resampled and counts["shards"] > 10 * len(self.plan.shards.urls) + _HOPELESS_SHARDS
        nothing = not self.buffer and (counts["empty_shards"] >= _HOPELESS_SHARDS or seen_often)
        if bad >= _HOPELESS_GROUPS or nothing:
            raise NoSamplesError(self._explain())

    def _explain(self) -> str:
        state = self.state
        counts = ", ".join(f"{reason} ×{n}" for reason, n in sorted(state["faults"].items(), key=lambda c: -c[1]))
        groups, shards = state["this_pass"]["groups"], state["this_pass"]["shards"]
        text = f"not one usable sample in {groups} groups of {shards} shards ({counts or 'no faults'})"
        if "missing_caption" in state["faults"]:
            sources = self.plan.caption_key or "a .txt, or a .json with 'caption'"
            text += f"; no member holds a caption (looked for {sources}); found: {describe(self.extensions)}"
        elif state["faults"].keys() <= set(SHARD_REASONS):
            text += "; no shard could be read: check the paths"
        else:
            text += f"; found: {describe(self.extensions)}"
        return text

    def _count(self, faults: list[Fault]) -> None:
        for fault in faults:
            self.state["faults"][fault.reason] = self.state["faults"].get(fault.reason, 0) + 1
            self.rows.append(fault)

    def _restore_buffer(self) -> None:
        """Read the pairs of the buffer again; their faults were counted when they were read first."""
        numbers = self.state["buffer"]
        self.state["buffer"] = []
        refs = [(numbers[i], numbers[i + 1]) for i in range(0, len(numbers), 2)]
        pairs: dict[tuple[int, int], Encoded] = {}
        for number in dict.fromkeys(shard for shard, _ in refs):
            shard = open_shard(self.plan.shards.urls[number], self.store)
            for ordinal in sorted({o for s, o in refs if s == number}):
                if ordinal < len(shard.groups):
                    pair, _ = shard.read(ordinal, self.plan.caption_key, self.plan.filters)
                    if pair is not None:
                        pairs[number, ordinal] = pair
            shard.close()
        for ref in refs:
            if ref in pairs:
                self.buffer.append((*ref, pairs[ref]))
                self.size += pairs[ref].n_bytes
        if len(self.buffer) < len(refs):
            log.warning("%d samples of the checkpoint are no longer in their shards", len(refs) - len(self.buffer))
