"""Writing files so that nothing half-written ever stands under a final name."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; when the block ends well it is fsynced and renamed over ``path``.

    When the block raises, the temporary file is removed and ``path`` is as it was.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        # A rename would put a regular file in the place of a device; a folder would refuse it after all the work.
        raise OSError(errno.EEXIST, "is not a regular file and is not replaced", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    tmp = Path(name)
    try:
        os.chmod(tmp, 0o666 & ~_umask())
        yield tmp
        with open(tmp, "rb") as f:
            os.fsync(f.fileno())
        os.replace(tmp, path)
        fsync_dir(path.parent)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder, or on a file made for that, where the file system has locks."""
    import fcntl

    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def fsync_dir(path: Path) -> None:
    """Make a rename in this folder durable (a no-op where folders cannot be opened)."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:  # some network file systems refuse fsync on folders; the rename itself is still atomic
        pass
    finally:
        os.close(handle)


def write_text(path: Path | str, text: str) -> None:
    """Write a whole text file atomically (UTF-8)."""
    with replacing(path) as tmp:
        tmp.write_text(text, encoding="utf-8")


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write a whole binary file atomically."""
    with replacing(path) as tmp:
        tmp.write_bytes(data)


def write_json(path: Path | str, value: Any) -> None:
    """Write JSON atomically, indented, floats in full precision; NaN is refused (it is not JSON)."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def append_jsonl(path: Path | str, *rows: dict[str, Any]) -> None:
    """Append rows as JSON lines in one write, so that a reader sees whole lines (NaN becomes null)."""
    text = "".join(json.dumps(_finite(row), ensure_ascii=False) + "\n" for row in rows)
    is_torn = False
    with open(path, "a+b") as f:
        if f.seek(0, os.SEEK_END):
            f.seek(-1, os.SEEK_END)
            is_torn = f.read(1) != b"\n"
        if is_torn:
            text = "\n" + text  # a writer was killed in the middle of a line: it must not swallow this one
        f.write(text.encode("utf-8"))


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """Read JSON lines; a torn last line (a process killed while writing) is left out."""
    rows = []
    text = Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""
    for line in text.split("\n"):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def _finite(value: Any) -> Any:
    if isinstance(value, float) and value not in (float("inf"), float("-inf")) and value == value:
        return value
    if isinstance(value, float):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
