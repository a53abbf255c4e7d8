"""A folder that keeps fetched shards: shared by all processes of a machine, limited in size, safe against kills."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from clip_linear.files import locked, replacing

_STALE_S = 3600.0


class ShardCache:
    """Files named by what they hold; the ones used longest ago go first when ``limit_bytes`` is passed."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, name: str, fill: Callable[[BinaryIO], None]) -> BinaryIO:
        """The file for ``name``; ``fill`` writes it when it is not there. Only one process fills it at a time."""
        path = self.folder / f"{hashlib.sha256(name.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}.tar"
        file = _use(path)
        if file is not None:
            return file
        with locked(path.with_suffix(".lock")):
            file = _use(path)  # another process may have filled it while this one waited
            if file is not None:
                return file
            with replacing(path) as tmp:
                with open(tmp, "r+b", buffering=1 << 20) as target:
                    fill(target)
                file = open(tmp, "rb", buffering=1 << 20)  # noqa: SIM115 - the caller closes it
        self._shrink(path)
        return file

    def _shrink(self, newest: Path) -> None:
        """Remove old files; a process that reads one keeps it open, so that it stays readable."""
        with locked(self.folder):
            for leftover in self.folder.glob(".*.tmp"):  # of a process that was killed while it wrote
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - leftover.stat().st_mtime > _STALE_S:
                        leftover.unlink()
            files = []
            for path in self.folder.glob("*.tar"):
                with contextlib.suppress(FileNotFoundError):
                    stat = path.stat()
                    files.append((stat.st_mtime_ns, stat.st_size, path))
            total = sum(size for _, size, _ in files)
            for _, size, path in sorted(files):
                if total <= self.limit_bytes:
                    break
                if path != newest:
                    path.unlink(missing_ok=True)
                    path.with_suffix(".lock").unlink(missing_ok=True)
                    total -= size


def _use(path: Path) -> BinaryIO | None:
    try:
        file = open(path, "rb", buffering=1 << 20)  # noqa: SIM115 - the caller closes it
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return file
