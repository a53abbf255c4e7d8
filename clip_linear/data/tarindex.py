"""The headers of one tar file, walked with recovery: every member that can still be read, and every damage by name.

The archive formats are ustar, pax and GNU (POSIX.1-2008, ``pax``; GNU tar manual, "Basic Tar Format").
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import BinaryIO

BLOCK = 512
_ZERO = bytes(BLOCK)
_READ_BYTES = (
    1 << 20
)  # headers are read through this buffer: sequential on network file systems, one copy on local ones
_MAX_NAME_BYTES = 1 << 20  # a longer "long name" or pax header is damage, not a name


@dataclass(frozen=True, slots=True)
class Member:
    """A regular file in the archive; ``segment`` grows by one at each damage or further archive."""

    name: str
    header: int  # byte offset of its (first) header
    start: int  # byte offset of its content
    size: int
    segment: int
    is_cut: bool = False


@dataclass
class TarIndex:
    """All readable members in order; ``damages`` are positions in ``members`` before which something was lost."""

    members: list[Member] = field(default_factory=list)
    faults: dict[str, tuple[int, str]] = field(default_factory=dict)  # shard reason -> (offset, detail)
    damages: list[int] = field(default_factory=list)

    def note(self, reason: str, offset: int, detail: str) -> None:
        """Record a shard's own reason; the first of a kind stands for all."""
        self.faults.setdefault(reason, (offset, detail))


@dataclass
class _Header:
    name: str
    size: int
    kind: bytes
    link: str
    has_magic: bool


def index_tar(file: BinaryIO) -> TarIndex:
    """Walk the headers of a seekable tar file (bytes of the file as they are: not compressed).

    After a damaged header the walk goes on at the next header with a valid magic and checksum, wherever it stands.
    """
    return _Walk(file).run()


class _Walk:
    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.length = file.seek(0, os.SEEK_END)
        self.index = TarIndex()
        self.segment = 0
        self.position = 0
        self.by_name: dict[str, Member] = {}

    def run(self) -> TarIndex:
        if self.length == 0:
            self.index.note("empty_shard", 0, "0 bytes")
            return self.index
        while self._step():
            pass
        if not self.index.members and not self.index.faults:
            self.index.note("empty_shard", 0, "no member")
        return self.index

    def _read(self, offset: int, size: int) -> bytes:
        self.file.seek(offset)
        return self.file.read(size)

    def _step(self) -> bool:
        """Read what stands at ``position``; False at the end of the walk."""
        at = self.position
        block = self._read(at, BLOCK)
        if len(block) < BLOCK:
            self._end_without_marker(at, block)
            return False
        if block == _ZERO:
            return self._after_zeros(at)
        header = parse_header(block)
        if header is None:
            return self._recover(at)
        return self._take(at, header)

    def _end_without_marker(self, at: int, rest: bytes) -> None:
        if not self.index.members and not looks_like_header(rest):
            self.index.note("corrupt_shard", 0, "no tar header")
            return
        detail = "the file ends inside a header" if rest.strip(b"\0") else "no end marker"
        self._truncated(at, detail)

    def _truncated(self, at: int, detail: str) -> None:
        self.index.note("truncated_shard", at, detail)
        self.index.damages.append(len(self.index.members))

    def _after_zeros(self, at: int) -> bool:
        """An end marker: done, unless more bytes follow (two archives in one file)."""
        follows = self._skip_zeros(at)
        if follows is None:
            return False
        block = self._read(follows, BLOCK)
        header = parse_header(block) if len(block) == BLOCK else None
        found = follows if header is not None and header.has_magic else self._find_header(follows)
        # One zero block before something that is no header is a header wiped out, not an end.
        reason = "corrupt_shard" if follows - at < 2 * BLOCK and found != follows else "data_after_end"
        self.index.note(reason, follows, f"{self.length - follows} bytes after the end marker")
        return self._resume_at(found, lost=found != follows)

    def _recover(self, at: int) -> bool:
        """A damaged header: go on at the next valid one, which may lie inside the member before it (lost bytes)."""
        last = self.index.members[-1] if self.index.members else None
        after = last.start if last is not None and last.segment == self.segment else at
        found = self._find_header(after)
        if last is not None and found is not None and found < at:
            self.index.members[-1] = Member(last.name, last.header, last.start, last.size, last.segment, is_cut=True)
        self.index.note("corrupt_shard", at, "no tar header" if found is None and last is None else "damaged header")
        return self._resume_at(found)

    def _resume_at(self, found: int | None, lost: bool = True) -> bool:
        if lost:
            self.index.damages.append(len(self.index.members))
        self.segment += 1
        if found is None:
            return False
        self.position = found
        return True

    def _take(self, at: int, header: _Header) -> bool:
        """Take one member with the long-name and pax headers before it."""
        first, size_override = at, None
        name = None
        while header.kind in b"LKxgX":
            content = self._read(at + BLOCK, min(header.size, _MAX_NAME_BYTES))
            following = at + BLOCK + _padded(header.size)
            block = self._read(following, BLOCK)
            if (len(content) < header.size and header.size <= _MAX_NAME_BYTES) or len(block) < BLOCK:
                self._truncated(at, "the file ends inside a header")
                return False
            if header.kind == b"L":
                name = _text(content.rstrip(b"\0"))
            elif header.kind in b"xX":
                records = _pax(content)
                name = records.get("path", name)
                size_override = _integer(records.get("size"), size_override)
            nested = parse_header(block)
            at = following
            if nested is None:
                return self._recover(at)
            header = nested
        size = header.size if size_override is None else size_override
        return self._append(first, at, name if name is not None else header.name, size, header)

    def _append(self, first: int, at: int, name: str, size: int, header: _Header) -> bool:
        start = at + BLOCK
        if header.kind == b"1" and header.link in self.by_name:  # a hard link: the content stands at its target
            target = self.by_name[header.link]
            self.index.members.append(Member(name, first, target.start, target.size, self.segment))
            self.position = start
            return True
        if header.kind in b"123456":  # links, devices and folders have no content, whatever their size field says
            self.position = start
            return True
        is_cut = start + size > self.length
        member = Member(name, first, start, size, self.segment, is_cut)
        if header.kind in b"0\x007":
            self.index.members.append(member)
            self.by_name[name] = member
        if is_cut:
            return self._recover_from_cut(first, start)
        self.position = start + _padded(size)
        return True

    def _recover_from_cut(self, first: int, start: int) -> bool:
        """A member that says it is longer than the file: the file was cut, or the bytes of a whole stretch are lost."""
        found = self._find_header(start)
        if found is None:
            self._truncated(first, "the file ends inside a member")
            return False
        self.index.note("corrupt_shard", first, "a member is longer than the bytes that follow it")
        return self._resume_at(found)

    def _skip_zeros(self, offset: int) -> int | None:
        """Offset of the first block (from ``offset`` on) that is not zero; None at the end of the file."""
        while True:
            chunk = self._read(offset, _READ_BYTES)
            if not chunk:
                return None
            rest = chunk.lstrip(b"\0")
            if rest:
                return offset + (len(chunk) - len(rest)) // BLOCK * BLOCK
            offset += len(chunk)

    def _find_header(self, offset: int) -> int | None:
        """Offset of the next header with a valid magic and checksum at or after ``offset``, on any byte."""
        overlap = BLOCK
        while offset + BLOCK <= self.length:
            chunk = self._read(offset, _READ_BYTES + overlap)
            at = chunk.find(b"ustar", 257)
            while at >= 0:
                block = chunk[at - 257 : at - 257 + BLOCK]
                header = parse_header(block) if len(block) == BLOCK else None
                # Zeros lost from a name shift it and keep the checksum: such a "header" has no name.
                if header is not None and header.name:
                    return offset + at - 257
                at = chunk.find(b"ustar", at + 1)
            offset += _READ_BYTES
        return None


def parse_header(block: bytes) -> _Header | None:
    """The fields of a 512-byte header; None if its checksum (or an octal field of it) is not valid."""
    stored = _number(block[148:156])
    if stored is None or block == _ZERO:
        return None
    # The checksum is the sum of all bytes with its own field taken as eight spaces.
    total = sum(block) - sum(block[148:156]) + 8 * 32
    if stored != total and stored != total - 256 * sum(b > 127 for b in block[:148] + block[156:]):
        return None
    size = _number(block[124:136])
    if size is None or size < 0:
        return None
    magic = block[257:263]
    name = block[:100].split(b"\0", 1)[0]
    if magic == b"ustar\0" and block[345] and block[156:157] not in b"LKxg":
        name = block[345:500].split(b"\0", 1)[0] + b"/" + name
    link = _text(block[157:257].split(b"\0", 1)[0])
    return _Header(_text(name), size, block[156:157], link, magic in (b"ustar\0", b"ustar "))


def looks_like_header(rest: bytes) -> bool:
    """Whether fewer than 512 bytes can be the beginning of a tar header (a name, zeros, an octal mode)."""
    name, zero, _ = rest[:100].partition(b"\0")
    mode = rest[100:107].strip(b"\0 ")
    return bool(name) and bool(zero) and all(c in b"01234567" for c in mode) and name.isascii()


def _padded(size: int) -> int:
    return (size + BLOCK - 1) // BLOCK * BLOCK


def _text(raw: bytes) -> str:
    # Names may hold any bytes; backslashreplace keeps different names different and can be written as UTF-8.
    return raw.decode("utf-8", "backslashreplace")


def _number(raw: bytes) -> int | None:
    if raw[0] & 0x80:  # GNU base-256, for sizes over 8 GiB
        return int.from_bytes(bytes([raw[0] & 0x7F]) + raw[1:], "big")
    text = raw.split(b"\0", 1)[0].strip()
    try:
        return int(text, 8) if text else 0
    except ValueError:
        return None


def _integer(text: str | None, default: int | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else default


def _pax(content: bytes) -> dict[str, str]:
    """Records ``LENGTH KEY=VALUE\\n`` of a pax extended header; stops at the first malformed one."""
    records: dict[str, str] = {}
    at = 0
    while at < len(content):
        length_text, space, _ = content[at : at + 20].partition(b" ")
        if not space or not length_text.isdigit() or (length := int(length_text)) <= len(length_text) + 1:
            break
        key, _, value = content[at + len(length_text) + 1 : at + length - 1].partition(b"=")
        records[_text(key)] = _text(value)
        at += length
    return records
