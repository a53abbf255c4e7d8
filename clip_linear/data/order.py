"""Which shard comes when: pure functions of (seed, pass, stream), and what is left to read when the layout changes.

A *unit* is ``(shard, first, step)``: the groups first, first + step, … of one shard by raw ordinal.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

Unit = tuple[int, int, int]


def draw(*key: object) -> int:
    """A random number of 63 bits that depends on nothing but ``key``."""
    text = "/".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def pass_units(n_shards: int, seed: int, pass_: int, stream: int, streams: int) -> list[Unit]:
    """The units of one stream in one pass without replacement.

    Whole shards are dealt out first; the rest that does not divide is shared group by group, so that streams stay
    equally long: by all streams where there are fewer shards than streams, else each rest shard by a few.
    """
    order = list(range(n_shards))
    random.Random(f"{seed}/{pass_}").shuffle(order)
    whole, rest = divmod(n_shards, streams)
    units = [(order[i * streams + stream], 0, 1) for i in range(whole)]
    left = order[n_shards - rest :]
    if not whole:
        return [(shard, stream, streams) for shard in left]
    if rest:
        mine = stream * rest // streams
        sharers = [s for s in range(streams) if s * rest // streams == mine]
        units.append((left[mine], sharers.index(stream), len(sharers)))
    return units


def drawn_unit(weights: Sequence[float] | None, n_shards: int, key: tuple[object, ...]) -> Unit:
    """A whole shard drawn with replacement: uniformly, or by weight."""
    chooser = random.Random("/".join(map(str, key)))
    if weights is None:
        return (chooser.randrange(n_shards), 0, 1)
    return (chooser.choices(range(n_shards), weights)[0], 0, 1)


def units_left(state: Mapping[str, Any], units: Sequence[Unit]) -> list[Unit]:
    """What a stream in this state has not read of the units of its pass."""
    left = list(units[state["unit"] :])
    if left and state["ordinal"] >= 0:
        shard, _, step = left[0]
        left[0] = (shard, state["ordinal"], step)
    return left


def deal(units: Sequence[Unit], streams: int) -> list[list[Unit]]:
    """Deal units out to streams; each is split by ordinal where there are fewer units than streams."""
    if len(units) >= streams:
        return [list(units[s::streams]) for s in range(streams)]
    return [[(shard, first + s * step, step * streams) for shard, first, step in units] for s in range(streams)]
