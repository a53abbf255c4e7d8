"""What ``clip-linear eval`` does: every checkpoint on every data set, each result written once and never redone."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clip_linear.errors import UserError
from clip_linear.files import write_json
from clip_linear_eval.models import Loaded, expand, load
from clip_linear_eval.results import read_rows, write_rows
from clip_linear_eval.world import World, open_world
from clip_linear_eval.zeroshot import Evaluation, Settings, measure


def cache_folder() -> Path:
    """Where tokens and classifiers are kept: $CLIP_LINEAR_CACHE, else below the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("CLIP_LINEAR_CACHE") or Path(base) / "clip_linear")


def run(args: argparse.Namespace, say: Callable[[str], None]) -> list[Evaluation]:
    """Evaluate as the parsed flags say. Raises UserError and RunError."""
    out = _out_path(args.out)
    with open_world(args.device) as world:
        evaluations = []
        for weights in expand(args.pretrained):
            loaded = load(args.model, weights, precision=args.precision, device=world.device)
            for dataset in args.dataset:
                evaluations.append(_one(loaded, dataset, args, world, out, say))
        return evaluations


def _one(
    loaded: Loaded, dataset: str, args: argparse.Namespace, world: World, out: Path | None, say: Callable[[str], None]
) -> Evaluation:
    settings = settings_of(args, world)
    evaluation = measure(loaded.model, loaded.preprocess, loaded.tokenizer, dataset, settings, info=loaded.info)
    evaluation.rows = [finite(row) for row in evaluation.rows]
    for note in evaluation.notes:
        say(f"{dataset}: {note}")
    if out is not None and world.rank == 0:
        save_rows(out, evaluation.rows)
    return evaluation


def settings_of(args: argparse.Namespace, world: World) -> Settings:
    """The settings that the parsed flags mean on this rank."""
    return Settings(
        dataset_type=args.dataset_type,
        classnames=args.classnames,
        templates=args.templates,
        batch_size=args.batch_size,
        precision=args.precision,
        device=world.device,
        limit=args.limit,
        on_error=args.on_error,
        restrict=args.restrict,
        labels=args.labels,
        split=args.split,
        workers=args.workers,
        cache=cache_folder(),
        rank=world.rank,
        world_size=world.size,
    )


def finite(row: dict[str, Any]) -> dict[str, Any]:
    """A row with None for numbers that are not finite, as JSON wants it."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _out_path(out: str | None) -> Path | None:
    if out is None:
        return None
    path = Path(out)
    if path.is_dir():
        return path / "eval.json"
    if path.suffix not in (".csv", ".jsonl", ".json"):
        raise UserError(f"--out {out!r}: write to a .csv, .jsonl or .json file, or into a folder that exists")
    return path


def load_rows(path: Path) -> list[dict[str, Any]]:
    """The rows that stand in a file of ``--out``; none where there is no file. Raises UserError."""
    if not path.exists():
        return []
    if path.suffix != ".json":
        rows = read_rows(path)
        return [row | {"errors": json.loads(row["errors"] or "[]")} if "errors" in row else row for row in rows]
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{str(path)!r} is not valid JSON ({error}); give --out another file") from None
    if not isinstance(rows, list):
        raise UserError(f"{str(path)!r} holds no list of rows; give --out another file")
    return rows


def save_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows to a file of ``--out``; rows of the same evaluation, data set and metric are replaced."""

    def key(row: dict[str, Any]) -> tuple:
        return row.get("eval_id"), row.get("dataset"), row.get("metric")

    new = {key(row) for row in rows}
    everything = [row for row in load_rows(path) if key(row) not in new] + rows
    if path.suffix == ".json":
        write_json(path, everything)
    else:
        write_rows(path, [row | {"errors": json.dumps(row.get("errors") or [])} for row in everything])
