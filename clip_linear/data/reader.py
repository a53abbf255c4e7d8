"""One shard, opened: its groups in order, its own faults, and the public ways to read shards without training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from clip_linear.data.decode import MAX_IMAGE_PIXELS, BadImageError, decode_image
from clip_linear.data.faults import Fault
from clip_linear.data.fetch import Store
from clip_linear.data.filters import Filter, parse_filters
from clip_linear.data.groups import CAPTION_EXTENSIONS, Group, group_faults, group_members, read_member
from clip_linear.data.remote import MissingShardError
from clip_linear.data.samples import Encoded, Sample, encode
from clip_linear.data.shards import expand
from clip_linear.data.tarindex import index_tar


@dataclass
class Shard:
    """The groups of one shard (their number in the list is their ordinal) and what is wrong with the shard itself."""

    url: str
    file: BinaryIO | None
    groups: list[Group]
    faults: list[Fault]
    extensions: Counter[str]

    def read(
        self, ordinal: int, caption_key: str | None, filters: tuple[Filter, ...]
    ) -> tuple[Encoded | None, list[Fault]]:
        """The pair of one group, or None, and its faults."""
        group = self.groups[ordinal]
        faults = group_faults(group, self.url)
        image = group.image
        if group.problem() is not None or image is None or self.file is None:
            return None, faults
        wanted = [image, *(group.members[e] for e in CAPTION_EXTENSIONS if e in group.members)]
        names = {id(member): extension for extension, member in group.members.items()}
        members = {names[id(m)]: read_member(self.file, m) for m in wanted}
        pair, more = encode(members, group.key, self.url, group.offset, caption_key, filters)
        if group.is_damaged:  # what is missing here is the damage's doing, which the shard's own reason tells
            more = [f for f in more if f.reason != "missing_caption"]
        return pair, faults + more

    def close(self) -> None:
        """Close the file; a spooled copy is deleted by that."""
        if self.file is not None:
            self.file.close()


def open_shard(url: str, store: Store, every_role: bool = False) -> Shard:
    """Open and index a shard. A shard that cannot be had or read gives no groups and the fault that says so."""
    try:
        file, damage = store.open(url)
    except MissingShardError as error:
        return Shard(url, None, [], [Fault("missing_shard", url, detail=str(error))], Counter())
    index = index_tar(file)
    if damage:
        index.note("corrupt_shard", 0, damage)
    grouping = group_members(index, file, every_role)
    if not grouping.groups and not index.faults:
        index.note("empty_shard", 0, f"no sample; found: {describe(grouping.extensions)}")
    faults = [Fault(reason, url, None, offset, detail) for reason, (offset, detail) in index.faults.items()]
    return Shard(url, file, grouping.groups, faults, grouping.extensions)


def describe(extensions: Counter[str]) -> str:
    """``.jpg ×40, .cls ×40``: the most frequent extensions."""
    return ", ".join(f".{e} ×{n}" for e, n in extensions.most_common(8)) or "nothing"


def read_samples(
    urls: str | Iterable[str],
    *,
    caption_key: str | None = None,
    filters: Iterable[str] = (),
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    faults: list[Fault] | None = None,
) -> Iterator[Sample]:
    """The good samples of shards, in their order, decoded. Never raises for a bad shard or sample.

    ``urls`` is one text in the syntax of ``--train-data`` or a list of such; ``caption_key`` and ``filters`` mean what
    ``--caption-key`` and ``--filter`` mean. What was lost is appended to ``faults`` (one Fault each) when it is given.
    """
    lost: list[Fault] = [] if faults is None else faults
    keep = parse_filters(filters)
    for url in expand(urls):
        shard = open_shard(url, Store())
        lost += shard.faults
        for ordinal in range(len(shard.groups)):
            pair, found = shard.read(ordinal, caption_key, keep)
            lost += found
            if pair is None:
                continue
            try:
                image = decode_image(pair.image, max_pixels=max_image_pixels)
            except BadImageError as error:
                lost.append(Fault(error.reason, url, pair.key, pair.offset, error.detail))
                continue
            yield Sample(image, pair.caption(f"{url}/{pair.key}"), pair.key, url)
        shard.close()


def read_groups(url: str, *, faults: list[Fault] | None = None) -> Iterator[tuple[str, dict[str, bytes]]]:
    """``(key, {extension: bytes})`` of every group in one shard, whatever its extensions (``cls``, ``txt``, ``npy``…).

    For evaluation sets in webdataset's layout. Recovers from damage like training does; the shard's own faults are
    appended to ``faults`` when it is given (a missing shard is a fault, not an exception). Members that were cut or
    stand beyond a damage are left out, so a reader checks for the extensions that it needs.
    """
    shard = open_shard(url, Store(), every_role=True)
    if faults is not None:
        faults += shard.faults
    for group in shard.groups:
        if shard.file is not None and group.members:
            yield group.key, {e: read_member(shard.file, m) for e, m in group.members.items()}
    shard.close()
