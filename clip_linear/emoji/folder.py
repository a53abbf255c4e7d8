"""``clip_linear.emoji.write``: the whole data folder, written under a temporary name and renamed when complete."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from clip_linear.emoji.concepts import EVAL_TEAM, TRAIN_TEAMS, load_concepts
from clip_linear.emoji.models import write_models
from clip_linear.emoji.pairs import split_pairs, write_shards
from clip_linear.emoji.sets import write_sets
from clip_linear.emoji.tiles import Tiles
from clip_linear.errors import UserError
from clip_linear.files import fsync_dir, write_json

MANIFEST = "emoji.json"
_FORMAT = 1  # to be raised when the written files change their meaning
_log = logging.getLogger(__name__)


def write(dir: Path | str, *, per_shard: int = 1000) -> dict[str, Any]:
    """Write training shards, evaluation sets and model configs below ``dir``; returns the counts.

    ``train/`` and ``val/`` (NNNNN.tar of ``per_shard`` samples, NNNNN_stats.json, sizes.json),
    ``eval/imagefolder/NAME/``, ``eval/wds/wds_NAME/``, ``configs/`` (ViT-emoji-wN.json and their vocabulary), and
    ``emoji.json`` with the counts and every file's hash. The same call writes the same bytes. A complete folder of
    ours is checked and used as it is.

    Raises UserError when ``dir`` holds something else, was written with other settings, or has files that are missing
    or changed, and when ``per_shard`` is not in 1 … 10,000.
    """
    if not isinstance(per_shard, int) or not 1 <= per_shard <= 10_000:
        raise UserError(f"per_shard {per_shard!r} is not a whole number from 1 to 10000; give for example 1000")
    root = Path(dir).expanduser().resolve()
    settings = {"format": _FORMAT, "per_shard": per_shard, "source": _source_hash()}
    if root.exists() and not (root.is_dir() and not any(root.iterdir())):
        return _reuse(root, settings)
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(
            f"{str(root)!r} cannot be a folder: a part of its path is a file; give another folder"
        ) from None
    tmp = Path(tempfile.mkdtemp(dir=root.parent, prefix=f".{root.name}.", suffix=".tmp"))
    try:
        counts = _fill(tmp / "data", per_shard)
        # The hashes stand in for an fsync of thousands of small files: a torn one is found on the next use.
        write_json(tmp / "data" / MANIFEST, settings | {"counts": counts, "files": _hashes(tmp / "data")})
        try:
            os.rename(tmp / "data", root)
        except OSError:
            if not (root / MANIFEST).exists():
                raise
            return _reuse(root, settings)  # somebody else has just written the same folder
        fsync_dir(root.parent)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    _log.info("wrote %d training pairs to %s", counts["train"]["pairs"], root)
    return counts


def _fill(out: Path, per_shard: int) -> dict[str, Any]:
    tiles, concepts = Tiles(), load_concepts()
    train, val = split_pairs(concepts)
    seen = {concept.hexcode for _, concept, _ in train}
    return {
        "train": write_shards(train, tiles, out / "train", per_shard),
        "val": write_shards(val, tiles, out / "val", per_shard),
        "eval": write_sets(concepts, seen, tiles, out / "eval"),
        "configs": write_models(out / "configs"),
    }


def _reuse(root: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The counts of a complete folder of ours; UserError for anything else. Files that others put there are let be."""
    advice = "give another folder, or delete this one to have it written"
    try:
        manifest = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
        recorded = {key: manifest[key] for key in settings}
        counts, hashes = dict(manifest["counts"]), dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        what = "holds other files" if root.is_dir() else "is not a folder"
        raise UserError(f"{str(root)!r} {what} and was not written by clip_linear.emoji; {advice}") from None
    for key, value in settings.items():
        if recorded[key] != value:
            raise UserError(f"{str(root)!r} was written with {key} {recorded[key]!r}, not {value!r}; {advice}")
    for name, digest in hashes.items():
        path = root / name
        if not path.is_file() or _hash(path) != digest:
            state = "has changed" if path.is_file() else "is missing"
            raise UserError(f"{str(path)!r} {state} since the folder was written; {advice} anew")
    return counts


def _hashes(root: Path) -> dict[str, str]:
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): _hash(path) for path in paths}


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _source_hash() -> str:
    """One hash over the packaged sheets and table."""
    found = hashlib.sha256()
    for name in ("concepts.jsonl", *(f"{team}.webp" for team in (*TRAIN_TEAMS, EVAL_TEAM))):
        found.update(files("clip_linear.emoji").joinpath(name).read_bytes())
    return found.hexdigest()[:16]
