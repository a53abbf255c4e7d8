"""The state of a loader as plain builtins: one entry a stream, merged over ranks, and re-dealt to another layout."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from clip_linear.data.order import Unit, deal, pass_units, units_left

log = logging.getLogger(__name__)
StreamState = dict[str, Any]


def fresh_stream() -> StreamState:
    """A stream that has read nothing. ``ordinal`` -1: the unit's shard is not opened yet."""
    return {
        "pass": 0,
        "unit": 0,
        "ordinal": -1,
        "draws": 0,
        "buffer": [],  # shard, ordinal, shard, ordinal, …: read and not yet delivered
        "plans": {},  # pass -> units, where they are not those of pass_units
        "groups": 0,  # groups read, over all passes
        "this_pass": fresh_pass(),
        "faults": {},
        "delivered": {},  # source -> samples
    }


def fresh_pass() -> dict[str, int]:
    """What a stream counts in one pass, to end when it yields nothing."""
    return {"delivered": 0, "groups": 0, "unreadable": 0, "undecodable": 0, "shards": 0, "empty_shards": 0}


def copy_stream(state: StreamState) -> StreamState:
    """A copy that later reading does not change; plans and buffers are replaced, never edited, so they are shared."""
    return {k: dict(v) if isinstance(v, dict) else v for k, v in state.items()}


def fingerprint(urls: Iterable[str]) -> str:
    """Names the shard list, so that a state is not applied to another one."""
    digest = hashlib.sha256()
    for url in urls:
        digest.update(url.encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()[:16]


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One state from the ``Batch.state`` of all ranks; with a checkpoint of one rank alone it is that rank's own."""
    merged: dict[str, Any] = {}
    for state in states:
        if not merged:
            merged = {**state, "streams": {}, "faults": {}}
        merged["streams"] |= state["streams"]
        merged["faults"] |= state["faults"]
    return merged


def adopt(
    state: Mapping[str, Any] | None, *, shards: str, n_shards: int, seed: int, streams: int, resampled: bool
) -> dict[str, Any]:
    """The state to go on from: as it is for the same layout, else re-dealt so that nothing of this pass comes twice."""
    new: dict[str, Any] = {"version": 1, "shards": shards, "streams_n": streams, "era": 0, "streams": {}, "faults": {}}
    if state is None:
        return new
    same_shards = state["shards"] == shards
    if same_shards and state["streams_n"] == streams:
        return {**state, "streams": dict(state["streams"]), "faults": dict(state["faults"])}
    new["era"], new["faults"] = state["era"] + 1, dict(state["faults"])
    if not same_shards:
        log.warning("the shards are not those of the checkpoint: reading begins anew")
    else:
        log.warning(
            "the data continue with %d streams (ranks × workers) after %d: the order changes, the rest of the pass is "
            "dealt out anew",
            streams,
            state["streams_n"],
        )
    old = [state["streams"].get(str(s)) or fresh_stream() for s in range(state["streams_n"])]
    for s in range(streams):
        new["streams"][str(s)] = fresh_stream()
    first = new["streams"]["0"]
    first["faults"] = add_up(o["faults"] for o in old)
    first["delivered"] = add_up(o["delivered"] for o in old)
    first["groups"] = sum(o["groups"] for o in old)
    if same_shards:
        _redeal(old, new["streams"], resampled, lambda p, s: pass_units(n_shards, seed, p, s, len(old)))
    return new


def _redeal(
    old: list[StreamState],
    new: dict[str, StreamState],
    resampled: bool,
    units_of: Callable[[int, int], list[Unit]],
) -> None:
    streams = len(new)
    refs = [tuple(o["buffer"][i : i + 2]) for o in old for i in range(0, len(o["buffer"]), 2)]
    for s, stream in enumerate(new.values()):
        stream["buffer"] = [number for ref in refs[s::streams] for number in ref]
    if resampled:
        return
    first, last = min(o["pass"] for o in old), max(o["pass"] for o in old)
    for pass_ in range(first, last + 1):
        left: list[Unit] = []
        for s, state in enumerate(old):
            if state["pass"] > pass_:
                continue
            units = [tuple(u) for u in state["plans"].get(str(pass_), [])] if str(pass_) in state["plans"] else None
            units = units_of(pass_, s) if units is None else units
            left += units_left(state, units) if state["pass"] == pass_ else units
        for stream, plan in zip(new.values(), deal(left, streams)):
            stream["plans"][str(pass_)] = [list(u) for u in plan]
    for stream in new.values():
        stream["pass"] = first


def add_up(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of several counts by name."""
    total: dict[str, int] = {}
    for each in counts:
        for name, n in each.items():
            total[name] = total.get(name, 0) + n
    return total
