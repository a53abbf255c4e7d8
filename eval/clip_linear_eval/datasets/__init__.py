"""Evaluation data in the layouts that people have: one door, ``open_source``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clip_linear.errors import UserError, unknown
from clip_linear_eval.datasets.base import DECODE_ERRORS, EvalSet, Source, evenly
from clip_linear_eval.datasets.resolve import resolve

__all__ = ["DECODE_ERRORS", "TYPES", "EvalSet", "Source", "evenly", "open_source", "resolve"]
TYPES = ("auto", "imagefolder", "wds", "parquet", "csv", "retrieval")


def open_source(
    dataset: str | Path, dataset_type: str = "auto", *, split: str = "test", labels: str | None = None
) -> Source:
    """List a data set. ``dataset_type`` is one of TYPES; ``auto`` looks at what is there. Raises UserError."""
    root = Path(dataset)
    if dataset_type not in TYPES:
        raise unknown("dataset type", dataset_type, TYPES, "leave it out to have it found")
    if not root.exists():
        raise UserError(f"dataset {str(dataset)!r} does not exist; give a folder, a tar, a parquet, CSV or JSON file")
    source = _open(root, dataset_type, split, labels)
    if dataset_type == "retrieval" and source.captions is None:
        raise UserError(f"{str(root)!r} has no captions, so it is no retrieval set")
    if source.targets is None and source.captions is None:
        from clip_linear_eval.datasets.flat import label_flat
        from clip_linear_eval.datasets.resolve import read_label_path

        source = label_flat(source, read_label_path(labels))
    return replace(source, name=source.name or "dataset")


def _open(root: Path, kind: str, split: str, labels: str | None) -> Source:
    from clip_linear_eval.datasets import captions, flat, folder, tables, tars

    if root.is_file() and root.suffix in (".csv", ".tsv"):
        return tables.read_csv(root, kind == "retrieval")
    if root.is_file() and root.suffix in (".json", ".jsonl"):
        return captions.read_captions(root, split)
    if kind == "csv":
        raise UserError(f"dataset type csv needs a .csv or .tsv file, not {str(root)!r}")
    if kind == "parquet" or root.suffix == ".parquet" or (kind == "auto" and _has(root, "*.parquet")):
        return tables.read_parquet(root, kind == "retrieval")
    if root.is_file() and not tars.is_tar(root):
        raise UserError(f"dataset {str(root)!r} is no folder, tar, parquet, CSV or JSON file")
    caption_file = captions.find_captions(root) if root.is_dir() else None
    if caption_file and kind in ("auto", "retrieval"):
        return captions.read_captions(caption_file, split)
    if kind == "wds" or root.is_file() or (kind != "imagefolder" and (_has(root, "*.tar*") or _has(root, "*/*.tar*"))):
        return tars.read_tars(root, split, kind == "retrieval")
    if flat.is_objectnet(root):
        return flat.read_objectnet(root)
    unlabelled = flat.read_flat(root)
    if unlabelled.files and (labels or not any(e.is_dir() for e in root.iterdir())):
        return unlabelled
    return folder.read_imagefolder(root)


def _has(root: Path, pattern: str) -> bool:
    return root.is_dir() and next(iter(root.glob(pattern)), None) is not None
