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
from typing import BinaryIO

from clip_linear.data.remote import MissingShardError, Retry, download, scheme

_COMPRESSED: dict[bytes, Callable[[BinaryIO], BinaryIO]] = {
    b"\x1f\x8b": lambda f: gzip.GzipFile(fileobj=f),  # type: ignore[dict-item,return-value]
    b"BZh": bz2.BZ2File,  # type: ignore[dict-item,return-value]
    b"\xfd7zXZ\0": lzma.LZMAFile,  # type: ignore[dict-item,return-value]
}
_COPY_BYTES = 1 << 20


class Store:
    """Opens shards; fetches the next one while the present one is read. One per stream; not shared between threads."""

    def __init__(self, retry: Retry | None = None) -> None:
        self.retry = retry or Retry()
        self._next: tuple[str, _Fetch] | None = None

    def open(self, url: str) -> BinaryIO:
        """The shard's plain tar bytes as a seekable file. Raises MissingShardError when it cannot be had."""
        ahead, self._next = self._next, None
        if ahead is not None and ahead[0] == url:
            return ahead[1].result()
        return _open_plain(url, self.retry)

    def prefetch(self, url: str) -> None:
        """Begin to fetch a shard that is not a plain local file; the next ``open`` of it waits for the rest."""
        if scheme(url) not in ("", "file") and (self._next is None or self._next[0] != url):
            self._next = (url, _Fetch(lambda: _open_plain(url, self.retry)))


class _Fetch(threading.Thread):
    """A fetch in the background; its error, if any, is raised where the result is asked for."""

    def __init__(self, work: Callable[[], BinaryIO]) -> None:
        super().__init__(daemon=True, name="shard-prefetch")
        self.work = work
        self.file: BinaryIO | None = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.file = self.work()
        except (MissingShardError, OSError) as error:
            self.error = error

    def result(self) -> BinaryIO:
        self.join()
        if self.error is not None:
            raise self.error
        assert self.file is not None
        return self.file


def _open_plain(url: str, retry: Retry) -> BinaryIO:
    kind = scheme(url)
    if kind in ("", "file"):
        return _plain(_open_local(url.removeprefix("file://")), url)
    spool = _spool()
    if kind == "pipe":
        _run_pipe(url.removeprefix("pipe:"), spool)
    else:
        download(url, spool, retry)
    spool.seek(0)
    return _plain(spool, url)


def _open_local(path: str) -> BinaryIO:
    try:
        if not Path(path).is_file():
            raise MissingShardError("is a folder" if Path(path).is_dir() else "no such file")
        return open(path, "rb", buffering=1 << 20)
    except OSError as error:
        raise MissingShardError(str(error)) from None


def _spool() -> BinaryIO:
    """An unnamed file: it is gone when it is closed, also after SIGKILL."""
    return tempfile.TemporaryFile(prefix="clip-linear-shard-", buffering=1 << 20)  # type: ignore[return-value]


def _plain(file: BinaryIO, url: str) -> BinaryIO:
    """The file itself, or a spool with its uncompressed bytes (as many as can be had, if it is damaged)."""
    magic = file.read(8)
    file.seek(0)
    opener = next((o for m, o in _COMPRESSED.items() if magic.startswith(m)), None)
    if opener is None:
        return file
    spool = _spool()
    try:
        with file, opener(file) as source:
            while chunk := source.read(_COPY_BYTES):
                spool.write(chunk)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, OSError) as error:
        if getattr(error, "errno", None) is not None:  # a full disk or a dead server is not a damaged shard
            raise
    spool.seek(0)
    return spool


def _run_pipe(command: str, spool: BinaryIO) -> None:
    with subprocess.Popen(command, shell=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        shutil.copyfileobj(process.stdout, spool, _COPY_BYTES)
        code = process.wait()
    if code and not spool.tell():
        raise MissingShardError(f"the command ended with {code}")
