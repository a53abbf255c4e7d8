"""Tables: parquet with Hugging Face's image column, and CSV or TSV files that list images."""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from clip_linear.errors import UserError
from clip_linear_eval.classnames import NameList
from clip_linear_eval.datasets.base import Source, own_texts

IMAGE_COLUMNS = ("image", "jpg", "png", "img", "filepath", "file_path", "path", "file", "filename", "file_name")
LABEL_COLUMNS = ("label", "labels", "cls", "class", "class_id", "wnid", "target", "fine_label")
CAPTION_COLUMNS = ("caption", "captions", "text", "title", "sentences", "txt")


def column_of(columns: Sequence[str], wanted: Sequence[str]) -> str | None:
    """The first wanted column that a table has, whatever its case."""
    lower = {c.lower(): c for c in columns}
    return next((lower[w] for w in wanted if w in lower), None)


def read_csv(path: Path, captions_first: bool = False) -> Source:
    """Rows of ``image`` (a path relative to the file) and a label or caption; several captions may be several rows.

    The separator is a tab in ``.tsv`` files and where the header holds one, else a comma. Raises UserError.
    """
    with open(path, newline="", encoding="utf-8-sig") as f:
        header = f.readline()
        f.seek(0)
        reader = csv.DictReader(f, delimiter="\t" if path.suffix == ".tsv" or "\t" in header else ",")
        columns = list(reader.fieldnames or ())
        rows = list(reader)
    image, label, caption = (column_of(columns, w) for w in (IMAGE_COLUMNS, LABEL_COLUMNS, CAPTION_COLUMNS))
    label = None if captions_first and caption else label
    if image is None or (label is None and caption is None):
        raise UserError(
            f"{str(path)!r} has columns {', '.join(columns) or '(none)'}; wanted: an image column "
            f"({', '.join(IMAGE_COLUMNS[3:])}) and a label ({', '.join(LABEL_COLUMNS[:5])}) or a caption column"
        )
    names, templates = own_texts(path.parent)
    source = Source(name=path.stem, root=path, files=[], read=lambda i: b"", names=names, templates=templates)
    if label is not None:
        source.files = [row[image] for row in rows]
        source.targets = [(row[label] or "").strip() for row in rows]
        empty = [i for i, target in enumerate(source.targets) if not target]
        if empty:
            raise UserError(f"{str(path)!r}: row {empty[0] + 2} has no {label}; every row needs one")
    else:
        by_image: dict[str, list[str]] = {}
        for row in rows:
            by_image.setdefault(row[image], []).append(row[str(caption)])
        source.files, source.captions = list(by_image), list(by_image.values())
    files = source.files
    source.read = lambda i: (path.parent / files[i]).read_bytes()
    return source


def read_parquet(root: Path, captions_first: bool = False) -> Source:
    """One parquet file or a folder of them: an image column (bytes, or a struct with ``bytes``) and labels or captions.

    Names come from the ClassLabel feature that Hugging Face stores in the schema. Row groups are read one at a time.
    Raises UserError where pyarrow is missing or the columns do not fit.
    """
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError("reading parquet needs pyarrow; run: pip install 'clip-linear[parquet]'") from None
    paths = [root] if root.is_file() else sorted(root.glob("*.parquet")) or sorted(root.glob("*/*.parquet"))
    if not paths:
        raise UserError(f"no .parquet files in {str(root)!r}")
    tables = [pq.ParquetFile(path) for path in paths]
    columns = tables[0].schema_arrow.names
    image, label, caption = (column_of(columns, w) for w in (IMAGE_COLUMNS, LABEL_COLUMNS, CAPTION_COLUMNS))
    label = None if captions_first and caption else label
    if image is None or (label is None and caption is None):
        raise UserError(f"{str(paths[0])!r} has columns {', '.join(columns)}; wanted: image, and label or caption")
    values: list[Any] = []
    places: list[tuple[int, int, int]] = []  # file, row group, row in it
    for f, table in enumerate(tables):
        for g in range(table.num_row_groups):
            column = table.read_row_group(g, columns=[label or caption]).column(0).to_pylist()
            values += column
            places += [(f, g, r) for r in range(len(column))]
    names, templates = own_texts(root if root.is_dir() else root.parent)
    features = json.loads((tables[0].schema_arrow.metadata or {}).get(b"huggingface", b"{}"))
    stored = (features.get("info", {}).get("features", {}).get(label or "") or {}).get("names")
    source = Source(
        name=(root if root.is_dir() else root.with_suffix("")).resolve().name,
        root=root,
        files=[f"{paths[f].name}:{g}:{r}" for f, g, r in places],
        read=_row_reader(tables, places, image, paths),
        names=names
        or (NameList(names=tuple(stored), keys=None, source="parquet features", closed=True) if stored else None),
        templates=templates,
    )
    if label is not None:
        source.targets = [str(v) for v in values]
    else:
        source.captions = [[_sentence(v)] if isinstance(v, str | dict) else [_sentence(c) for c in v] for v in values]
    return source


def _sentence(value: Any) -> str:
    return str(value.get("raw") or value.get("caption")) if isinstance(value, dict) else str(value)


def _row_reader(
    tables: list, places: list[tuple[int, int, int]], image: str, paths: list[Path]
) -> Callable[[int], bytes]:
    """Read one row's image; the last two row groups are kept, since rows are asked for nearly in order."""
    kept: dict[tuple[int, int], list] = {}
    lock = threading.Lock()

    def read(i: int) -> bytes:
        f, g, r = places[i]
        with lock:
            if (f, g) not in kept:
                if len(kept) >= 2:
                    kept.pop(next(iter(kept)))
                kept[f, g] = tables[f].read_row_group(g, columns=[image]).column(0).to_pylist()
            value = kept[f, g][r]
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, str):
            return (paths[f].parent / value).read_bytes()
        if not value:
            raise OSError("the image is empty")
        return bytes(value)

    return read
