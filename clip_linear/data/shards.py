"""``--train-data`` to a list of shards: brace patterns, globs, folders, list files, URLs, ``pipe:``."""

from __future__ import annotations

import ast
import glob
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from clip_linear.data.remote import scheme
from clip_linear.errors import UserError

_SHARD_NAMES = re.compile(r"\.(tar|tgz|tar\.(gz|bz2|xz))$", re.IGNORECASE)
_LIST_NAMES = re.compile(r"\.(txt|list|lst)$", re.IGNORECASE)


@dataclass(frozen=True)
class ShardList:
    """All shards in their given order, the source of each, and its weight when drawn with replacement."""

    urls: tuple[str, ...]
    sources: tuple[int, ...]
    weights: tuple[float, ...] | None = None


def expand(urls: str | Iterable[str]) -> list[str]:
    """The shards that a text (or several) names, in order. Raises UserError when one names none."""
    texts = [urls] if isinstance(urls, str) else list(urls)
    found = [url for text in texts for part in text.split("::") for url in _expand_source(part)]
    if not found:
        raise UserError("no shards are given; name a .tar, a folder, a glob, a brace pattern or a list file")
    return found


def shard_list(train_data: str, upsampling_factors: str | None = None) -> ShardList:
    """Shards of ``--train-data`` with the weights of ``--train-data-upsampling-factors``. Raises UserError."""
    parts = train_data.split("::")
    factors: list[float] | None = None
    if upsampling_factors is not None:
        factors = [_factor(f) for f in upsampling_factors.split("::")]
        if len(factors) != len(parts):
            raise UserError(
                f"--train-data names {len(parts)} sources and --train-data-upsampling-factors {len(factors)} numbers; "
                "give one number for each source, joined with ::"
            )
    found = [(url, i) for i, part in enumerate(parts) for url in _expand_source(part)]
    weights = None if factors is None else tuple(factors[i] for _, i in found)
    return ShardList(tuple(u for u, _ in found), tuple(i for _, i in found), weights)


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise UserError(f"upsampling factor {text!r} is no number above 0; write e.g. 1::2::0.5")
    return value


def _expand_source(text: str) -> list[str]:
    from braceexpand import braceexpand

    text = text.strip()
    if not text:
        raise UserError("a source of shards is empty; name a .tar, a folder, a glob, a brace pattern or a list file")
    if scheme(text) in ("", "file") and Path(text.removeprefix("file://")).exists():
        return _expand_path(text)
    try:
        patterns = list(braceexpand(text))
    except ValueError:
        raise UserError(f"braces in {text!r} do not match; write e.g. data/{{00000..00007}}.tar") from None
    return [url for pattern in patterns for url in _expand_path(pattern)]


def _expand_path(text: str) -> list[str]:
    kind = scheme(text)
    if kind in ("pipe", "http", "https"):
        return [text]
    if kind not in ("", "file"):
        return _glob_remote(text) if re.search(r"[*?\[]", text) else [text]
    path = Path(text.removeprefix("file://"))
    if path.is_dir():
        return _list_folder(path)
    if path.is_file():
        return _read_list(path) if _LIST_NAMES.search(path.name) else [text]
    if re.search(r"[*?\[]", text):
        found = sorted(glob.glob(text, recursive=True))
        if not found:
            raise UserError(f"no file matches {text!r}; check the path")
        return [f for f in found if Path(f).is_file()]
    return [text]  # a listed shard that does not exist is counted as missing, and the others are read


def _list_folder(path: Path) -> list[str]:
    found = sorted(str(p) for p in path.iterdir() if _SHARD_NAMES.search(p.name))
    found = found or sorted(str(p) for p in path.rglob("*") if _SHARD_NAMES.search(p.name))
    if not found:
        raise UserError(f"folder {str(path)!r} holds no .tar; name the folder of the shards")
    return found


def _read_list(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"list file {str(path)!r} cannot be read ({error}); write one shard a line") from None
    found = []
    for line in lines:
        if line and not line.startswith("#"):
            beside = path.parent / line
            is_relative = scheme(line) == "" and not Path(line).is_absolute() and not Path(line).exists()
            found += _expand_source(str(beside) if is_relative else line)
    if not found:
        raise UserError(f"list file {str(path)!r} names no shard; write one shard a line")
    return found


def _glob_remote(text: str) -> list[str]:
    try:
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(text)
        found = [filesystem.unstrip_protocol(p) for p in sorted(filesystem.glob(path))]
    except (ImportError, ValueError) as error:
        raise UserError(f"{text} cannot be listed: {error}; run: pip install 'clip-linear[remote]'") from None
    if not found:
        raise UserError(f"no object matches {text!r}; check bucket and prefix")
    return found


def count_samples(urls: Iterable[str]) -> int | None:
    """Samples in local shards by the writer's own notes, without reading them; None when one shard has no note.

    Notes: ``sizes.json`` and ``__len__`` (OpenCLIP), ``NNNNN_stats.json`` and ``NNNNN.parquet`` (img2dataset).
    """
    total = 0
    sizes: dict[Path, dict[str, int]] = {}
    urls = [u.removeprefix("file://") for u in urls]
    folders = {Path(u).parent for u in urls}
    for url in urls:
        if scheme(url):
            return None
        path = Path(url)
        noted = sizes.setdefault(path.parent, _sizes(path.parent)).get(path.name)
        if noted is None:
            noted = _stats(path)
        if noted is None:
            return _length_note(folders)
        total += noted
    return total


def _sizes(folder: Path) -> dict[str, int]:
    try:
        return {name: int(n) for name, n in json.loads((folder / "sizes.json").read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _length_note(folders: set[Path]) -> int | None:
    if len(folders) != 1:
        return None
    try:
        return int(ast.literal_eval((folders.pop() / "__len__").read_text(encoding="utf-8")))
    except (OSError, ValueError, SyntaxError, TypeError):
        return None


def _stats(path: Path) -> int | None:
    stem = path.name.split(".", 1)[0]
    try:
        return int(json.loads((path.parent / f"{stem}_stats.json").read_text(encoding="utf-8"))["successes"])
    except (OSError, ValueError, KeyError, TypeError):
        return _parquet_rows(path.parent / f"{stem}.parquet")


def _parquet_rows(path: Path) -> int | None:
    if not path.is_file():
        return None
    try:
        import pyarrow.parquet as pq
    except ImportError:
        return None
    table = pq.ParquetFile(path)
    if "status" not in table.schema_arrow.names:
        return int(table.metadata.num_rows)
    return sum(s == "success" for s in table.read(columns=["status"])["status"].to_pylist())
