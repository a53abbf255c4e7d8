"""Download with back-off, going on where the connection broke."""

from __future__ import annotations

import http.client
import logging
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import BinaryIO

from clip_linear.errors import UserError

log = logging.getLogger(__name__)
_COPY_BYTES = 1 << 20
_FINAL = (400, 401, 403, 404, 405, 410)  # asking again would not help


def scheme(url: str) -> str:
    """``http``, ``s3``, ``pipe``, …; empty for a local path."""
    head, colon, rest = url.partition(":")
    if head == "pipe" and colon:
        return "pipe"
    return head.lower() if colon and rest.startswith("//") else ""


class MissingShardError(Exception):
    """A shard that cannot be had; the text says why."""


@dataclass(frozen=True)
class Retry:
    """How stubborn a download is; the pause doubles from ``first_pause_s`` on, and is reset by progress."""

    attempts: int = 6
    first_pause_s: float = 0.5
    timeout_s: float = 60.0


def download(url: str, target: BinaryIO, retry: Retry) -> None:
    """Write the bytes at ``url`` to ``target`` (at its beginning). Raises MissingShardError when all attempts fail."""
    fetch = _fetch_http if scheme(url) in ("http", "https") else _fetch_fsspec
    transient: tuple[type[BaseException], ...] = (OSError, EOFError, http.client.HTTPException, *_client_errors())
    failures = 0
    while True:
        had = target.tell()
        try:
            fetch(url, target, retry.timeout_s)
            return
        except (FileNotFoundError, PermissionError) as error:
            raise MissingShardError(str(error) or type(error).__name__) from None
        except transient as error:
            failures = 1 if target.tell() > had else failures + 1
            if failures >= retry.attempts:
                raise MissingShardError(f"{failures} attempts: {error}") from None
            log.debug("%s at byte %d: %s; trying again", url, target.tell(), error)
            time.sleep(retry.first_pause_s * 2 ** (failures - 1))


def _client_errors() -> tuple[type[BaseException], ...]:
    """Errors of the S3 client that are no OSErrors, if it is installed."""
    import sys

    found = []
    for module, name in (("botocore.exceptions", "BotoCoreError"), ("aiohttp", "ClientError")):
        if module in sys.modules:
            found.append(getattr(sys.modules[module], name))
    return tuple(found)


def _fetch_http(url: str, target: BinaryIO, timeout_s: float) -> None:
    had = target.tell()
    request = urllib.request.Request(url, headers={"User-Agent": "clip-linear"})
    if had:
        request.add_header("Range", f"bytes={had}-")
    try:
        response = urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is left: the bytes that we have are all
            return
        if error.code in _FINAL:
            raise FileNotFoundError(f"HTTP {error.code} {error.reason}") from None
        raise
    with response:
        skip = had if had and response.status == 200 else 0  # a server without ranges begins again
        left = response.length
        while chunk := response.read1(_COPY_BYTES):  # unlike read, it keeps what came before a reset
            if left is not None:
                left -= len(chunk)
            dropped = min(skip, len(chunk))
            skip -= dropped
            target.write(chunk[dropped:])
        if left:
            raise ConnectionError(f"the connection ended {left} bytes early")


def _fetch_fsspec(url: str, target: BinaryIO, timeout_s: float) -> None:
    try:
        import fsspec
    except ImportError:
        raise UserError(f"{url} needs fsspec; run: pip install 'clip-linear[remote]'") from None
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url} cannot be opened: {error}; run: pip install 'clip-linear[remote]'") from None
    size = filesystem.size(path)
    while size is None or target.tell() < size:
        at = target.tell()
        chunk = filesystem.cat_file(path, start=at, end=at + 8 * _COPY_BYTES)
        if not chunk:
            break
        target.write(chunk)
