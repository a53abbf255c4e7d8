"""A shard as a seekable local file, wherever it lies: on disk, compressed, ``pipe:``, http(s), s3/gs, any fsspec."""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import subprocess
import tempfile
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from clip_linear.data.cache import ShardCache
from clip_linear.data.remote import MissingShardError, Retry, download, scheme

_COMPRESSED: dict[bytes, Callable[[BinaryIO], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
}
_COPY_BYTES = 1 << 20


class Opened(NamedTuple):
    """The plain tar bytes of a shard, and what is wrong with the compression around them (mostly nothing)."""

    file: BinaryIO
    damage: str = ""


class Store:
    """Opens shards; fetches the next one while the present one is read. One per stream; not shared between threads."""

    def __init__(self, cache: ShardCache | None = None, retry: Retry | None = None) -> None:
        self.cache = cache
        self.retry = retry or Retry()
        self._next: tuple[str, _Fetch] | None = None

    def open(self, url: str) -> Opened:
        """The shard's plain tar bytes as a seekable file. Raises MissingShardError when it cannot be had."""
        ahead, self._next = self._next, None
        if ahead is not None and ahead[0] == url:
            return ahead[1].result()
        return self._open(url)

    def prefetch(self, url: str) -> None:
        """Begin to fetch a shard that is not a plain local file; the next ``open`` of it waits for the rest."""
        is_plain = scheme(url) in ("", "file") and not url.endswith(("gz", "bz2", "xz"))
        if not is_plain and (self._next is None or self._next[0] != url):
            self._next = (url, _Fetch(lambda: self._open(url)))

    def _open(self, url: str) -> Opened:
        if scheme(url) in ("", "file"):
            return _plain(_open_local(url.removeprefix("file://")))
        if self.cache is not None:
            return _plain(self.cache.open(url, lambda target: self._fetch(url, target)))
        spool = _spool()
        self._fetch(url, spool)
        spool.seek(0)
        return _plain(spool)

    def _fetch(self, url: str, target: BinaryIO) -> None:
        if scheme(url) == "pipe":
            _run_pipe(url.removeprefix("pipe:"), target)
        else:
            download(url, target, self.retry)


class _Fetch(threading.Thread):
    """A fetch in the background; its error, if any, is raised where the result is asked for."""

    def __init__(self, work: Callable[[], Opened]) -> None:
        super().__init__(daemon=True, name="shard-prefetch")
        self.work = work
        self.opened: Opened | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.opened = self.work()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised again by the thread that reads
            self.error = error

    def result(self) -> Opened:
        self.join()
        if self.opened is None:
            raise self.error or RuntimeError("the fetch ended without a result")
        return self.opened


def _open_local(path: str) -> BinaryIO:
    try:
        if not Path(path).is_file():
            raise MissingShardError("is a folder" if Path(path).is_dir() else "no such file")
        return open(path, "rb", buffering=_COPY_BYTES)
    except OSError as error:
        raise MissingShardError(str(error)) from None


def _spool() -> BinaryIO:
    """An unnamed file: it is gone when it is closed, also after SIGKILL."""
    return tempfile.TemporaryFile(prefix="clip-linear-shard-", buffering=_COPY_BYTES)  # type: ignore[return-value]


def _plain(file: BinaryIO) -> Opened:
    """The file itself, or a spool with its uncompressed bytes (as many as can be had, if it is damaged)."""
    magic = file.read(8)
    file.seek(0)
    opener = next((o for m, o in _COMPRESSED.items() if magic.startswith(m)), None)
    if opener is None:
        return Opened(file)
    spool, damage = _spool(), ""
    try:
        with file, opener(file) as source:
            while chunk := source.read1(_COPY_BYTES):  # unlike read, it gives what stands before a damage
                spool.write(chunk)
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if getattr(error, "errno", None) is not None:  # a full disk or a dead server is not a damaged shard
            raise
        # A stream that just ends is a cut file, which the tar inside tells by itself.
        damage = "" if isinstance(error, EOFError) else f"damaged compression: {error}"
    spool.seek(0)
    return Opened(spool, damage)


def _run_pipe(command: str, target: BinaryIO) -> None:
    with subprocess.Popen(command, shell=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            shutil.copyfileobj(process.stdout, target, _COPY_BYTES)
            code = process.wait()
        except BaseException:
            process.kill()
            raise
    if code and not target.tell():
        raise MissingShardError(f"the command ended with {code}")
