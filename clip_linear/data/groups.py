"""Members of one shard become groups (samples still encoded), and every group that cannot be one is named.

Rules: the key is the base name up to the first dot, the extension the rest in lower case; members belong together by
key, wherever they stand, but never across a damage or a second archive in the same file, and never across shards.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field
from typing import BinaryIO

from clip_linear.data.faults import Fault
from clip_linear.data.tarindex import Member, TarIndex

IMAGE_EXTENSIONS = ("jpg", "png", "jpeg", "webp")  # OpenCLIP's, in its order of preference
_FOREIGN = """
apng avif bmp dng eps exr gif hdr heic heif ico j2k jfif jp2 jpe jpx jxl pcx pgm pnm ppm psd raw svg svgz tga tif tiff
"""
FOREIGN_IMAGE_EXTENSIONS = frozenset(_FOREIGN.split())
CAPTION_EXTENSIONS = ("txt", "json")


@dataclass(slots=True)
class Group:
    """The members of one key: what may become a sample."""

    key: str
    offset: int  # of the first member's header
    segment: int
    members: dict[str, Member] = field(default_factory=dict)  # extension -> member
    positions: list[int] = field(default_factory=list)  # where the members stand in the archive
    is_damaged: bool = False  # a member of it was cut, or bytes beside it were lost
    duplicates: int = 0  # how many more times the key came
    folder: str = ""

    @property
    def image(self) -> Member | None:
        """The image member, by OpenCLIP's order of extensions."""
        return next((self.members[e] for e in IMAGE_EXTENSIONS if e in self.members), None)

    def problem(self) -> str | None:
        """Why the names alone say that this is no sample (``missing_caption`` may still turn up inside a json)."""
        if self.image is None:
            foreign = FOREIGN_IMAGE_EXTENSIONS.intersection(self.members)
            return "unsupported_extension" if foreign else "missing_image"
        if not any(e in self.members for e in CAPTION_EXTENSIONS):
            return "missing_caption"
        return None


def split_name(name: str) -> tuple[str, str, str]:
    """``a/b/000.JPG`` -> (``a/b``, ``000``, ``jpg``); a hidden file has no key, a name without a dot no extension."""
    folder, _, base = name.rpartition("/")
    key, _, extension = base.partition(".")
    return folder, key, extension.lower()


def has_role(extension: str) -> bool:
    """Whether members with this extension say anything about an image–caption sample."""
    return extension in IMAGE_EXTENSIONS or extension in CAPTION_EXTENSIONS or extension in FOREIGN_IMAGE_EXTENSIONS


@dataclass
class Grouping:
    """What one shard holds: groups by first member, and how often each extension was seen."""

    groups: list[Group]
    extensions: Counter[str]


def group_members(index: TarIndex, file: BinaryIO, every_role: bool = False) -> Grouping:
    """Group the members of a shard. ``every_role`` keeps members of any extension (``.cls`` and others).

    ``file`` is the shard itself: where a key stands in two archives of one file, the bytes tell a copy from a sample.
    """
    found: dict[tuple[int, str, str], list[Group]] = {}
    extensions: Counter[str] = Counter()
    for position, member in enumerate(index.members):
        folder, key, extension = split_name(member.name)
        if not key or not extension or "__MACOSX" in folder.split("/"):
            continue
        # Dots in the key make each extension another one: they are counted together.
        extensions[extension if "." not in extension else f"*.{extension.rpartition('.')[2]}"] += 1
        if not every_role and not has_role(extension):
            continue
        _place(found.setdefault((member.segment, folder, key), []), folder, key, extension, member, position)
    groups = _join_folders([g for same in found.values() for g in _count_duplicates(same)])
    groups.sort(key=lambda g: g.offset)
    _mark_damaged(groups, index)
    return Grouping(_drop_copies(groups, file), extensions)


def _place(same: list[Group], folder: str, key: str, extension: str, member: Member, position: int) -> None:
    """Put a member into the first group of its key that has none of this extension."""
    group = next((g for g in same if extension not in g.members), None)
    if group is None:
        group = Group(key, member.header, member.segment, folder=folder)
        same.append(group)
    group.positions.append(position)
    if member.is_cut:
        group.is_damaged = True
    else:
        group.members[extension] = member


def _count_duplicates(same: list[Group]) -> list[Group]:
    """A key that comes again in one archive counts as a duplicate of its first group."""
    same[0].duplicates = len(same) - 1
    return same[:1]


def _join_folders(groups: list[Group]) -> list[Group]:
    """Join halves of a sample that lie in different folders (``img/0.jpg``, ``txt/0.txt``); whole ones stay apart."""
    halves: dict[tuple[int, str], Group] = {}
    joined = []
    for group in groups:
        first = halves.get((group.segment, group.key))
        if group.problem() is None or first is None or not first.members.keys().isdisjoint(group.members):
            joined.append(group)
            if group.problem() is not None:
                halves[group.segment, group.key] = group
            continue
        first.members.update(group.members)
        first.positions += group.positions
        first.is_damaged |= group.is_damaged
        first.duplicates += group.duplicates
        first.offset = min(first.offset, group.offset)
    return joined


def _mark_damaged(groups: list[Group], index: TarIndex) -> None:
    """Mark the groups that a damage may have robbed of members: those beside it, or all where keys are interleaved."""
    if not index.damages:
        return
    damages = sorted(index.damages)
    taken = sorted(p for g in groups for p in g.positions)
    spread = [bisect.bisect(taken, max(p)) - bisect.bisect_left(taken, min(p)) > len(p)
              for p in (g.positions for g in groups) if len(p) > 1]  # fmt: skip
    interleaved = 2 * sum(spread) > len(spread)
    for group in groups:
        beside = any(bisect.bisect_left(damages, p) != bisect.bisect_right(damages, p + 1) for p in group.positions)
        group.is_damaged |= interleaved or beside


def _drop_copies(groups: list[Group], file: BinaryIO) -> list[Group]:
    """A key that stands in two archives of one file is two samples, unless the second is a copy of the first."""
    first: dict[str, Group] = {}
    kept = []
    for group in groups:
        known = first.setdefault(group.key, group)
        if known.segment != group.segment and group.members and _content(known, file) == _content(group, file):
            known.duplicates += 1
        else:
            kept.append(group)
    return kept


def _content(group: Group, file: BinaryIO) -> dict[str, bytes]:
    return {extension: read_member(file, member) for extension, member in group.members.items()}


def read_member(file: BinaryIO, member: Member) -> bytes:
    """The content of a member."""
    file.seek(member.start)
    return file.read(member.size)


def group_faults(group: Group, shard: str) -> list[Fault]:
    """The faults that names alone tell: duplicates, and a lack of image or caption that no damage explains."""
    faults = [
        Fault("duplicate_key", shard, group.key, group.offset, f"the key comes again in this shard, time {n + 1}")
        for n in range(group.duplicates)
    ]
    problem = group.problem()
    if problem is not None and not group.is_damaged:
        detail = "members: " + " ".join(f".{e}" for e in sorted(group.members))
        faults.append(Fault(problem, shard, group.key, group.offset, detail))
    return faults
