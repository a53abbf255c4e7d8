"""Image–caption pairs outside shards: folders of images beside text files, and CSV, TSV or parquet tables."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clip_linear.data.faults import Fault
from clip_linear.data.groups import FOREIGN_IMAGE_EXTENSIONS, IMAGE_EXTENSIONS
from clip_linear.data.samples import CaptionError, find_captions
from clip_linear.errors import UserError

_IMAGES = (set(IMAGE_EXTENSIONS) | FOREIGN_IMAGE_EXTENSIONS) - {"svg", "svgz"}
_TABLES = (".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class Entry:
    """One image–caption pair that is read only when it is wanted."""

    name: str
    load: Callable[[], tuple[bytes, str]]  # raises CaptionError or OSError


def find_entries(sources: Sequence[str], image_key: str, caption_key: str, separator: str | None) -> Iterator[Entry]:
    """The pairs of folders and tables, in order. Raises UserError for a source that is neither, or lacks a column."""
    for source in sources:
        path = Path(source)
        if path.is_dir():
            yield from _folder(path)
        elif path.is_file() and path.suffix.lower() in _TABLES:
            yield from _table(path, image_key, caption_key, separator)
        else:
            what = "is no folder and no .csv, .tsv or .parquet" if path.exists() else "does not exist"
            raise UserError(f"{source!r} {what}; name a folder of images with .txt files beside them, or a table")


def shuffled(entries: Iterator[Entry], seed: int | None) -> list[Entry]:
    """All entries, in their order or shuffled by a seed."""
    found = list(entries)
    if seed is not None:
        random.Random(seed).shuffle(found)
    return found


def lost(entry: Entry, reason: str, detail: str) -> Fault:
    """The fault of an entry that cannot be written."""
    return Fault(reason, entry.name, detail=detail)


def _folder(folder: Path) -> Iterator[Entry]:
    images = [p for p in sorted(folder.rglob("*")) if p.suffix[1:].lower() in _IMAGES and not p.name.startswith(".")]
    if not images:
        raise UserError(f"folder {str(folder)!r} holds no images ({', '.join(IMAGE_EXTENSIONS)} and others)")
    for path in images:
        yield Entry(str(path), lambda path=path: (path.read_bytes(), _beside(path)))  # type: ignore[misc]


def _beside(image: Path) -> str:
    """The caption in the ``.txt`` beside an image, else in the ``.json``. Raises CaptionError."""
    members = {
        extension: path.read_bytes()
        for extension in ("txt", "json")
        if (path := image.with_suffix(f".{extension}")).is_file()
    }
    try:
        fields = json.loads(members.get("json", b"{}"))
    except ValueError:
        fields = {}
    return find_captions(members, fields if isinstance(fields, dict) else {}, None)[0]


def _table(path: Path, image_key: str, caption_key: str, separator: str | None) -> Iterator[Entry]:
    rows = _parquet_rows(path) if path.suffix.lower() == ".parquet" else _text_rows(path, separator)
    for number, row in enumerate(rows):
        for key in (image_key, caption_key):
            if key not in row:
                raise UserError(
                    f"{str(path)!r} has no column {key!r}; it has {', '.join(map(repr, row))}; "
                    "name them with --csv-img-key and --csv-caption-key, and the separator with --csv-separator"
                )
        image, caption = row[image_key], row[caption_key]
        yield Entry(f"{path}#{number}", lambda i=image, c=caption: (_bytes(i, path.parent), _caption(c)))  # type: ignore[misc]


def _text_rows(path: Path, separator: str | None) -> Iterator[dict[str, Any]]:
    delimiter = separator or ("\t" if path.suffix.lower() == ".tsv" else ",")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            yield from csv.DictReader(file, delimiter=delimiter)
    except (UnicodeDecodeError, csv.Error, TypeError) as error:
        raise UserError(f"{str(path)!r} cannot be read as a table: {error}") from None


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(f"{str(path)!r} needs pyarrow; run: pip install 'clip-linear[parquet]'") from None
    try:
        for batch in pq.ParquetFile(path).iter_batches(1024):
            yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise UserError(f"{str(path)!r} cannot be read as parquet: {error}") from None


def _bytes(image: Any, folder: Path) -> bytes:
    """An image as a path (relative to the table), as bytes, or as Hugging Face's ``{"bytes": …, "path": …}``."""
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return image
    if not image:
        raise FileNotFoundError("no image is named")
    return (folder / str(image)).read_bytes()


def _caption(caption: Any) -> str:
    text = caption if isinstance(caption, str) else ""
    if not text.strip():
        raise CaptionError("empty_caption", "the caption has no characters")
    return text
