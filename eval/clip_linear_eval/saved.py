"""The file of ``--out``: rows in CSV, JSON lines or JSON, and CLIP_benchmark's JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from clip_linear.errors import UserError
from clip_linear.files import write_json
from clip_linear_eval.results import read_rows, write_rows

# Our metric → CLIP_benchmark's; it calls text→image "image retrieval".
_CLIP_BENCHMARK = {
    "top1": "acc1",
    "top5": "acc5",
    "mean_per_class_recall": "mean_per_class_recall",
    **{f"text_to_image_recall@{k}": f"image_retrieval_recall@{k}" for k in (1, 5, 10)},
    **{f"image_to_text_recall@{k}": f"text_retrieval_recall@{k}" for k in (1, 5, 10)},
}


def out_path(out: str | None) -> Path | None:
    """Where ``--out`` writes; a folder means its ``eval.json``. Raises UserError for another kind of file."""
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
        if any("metric" not in row or "dataset" not in row for row in rows):
            raise UserError(f"{str(path)!r} is not a table of results; give --out another file")
        return [row | {"errors": _errors(row["errors"])} if "errors" in row else row for row in rows]
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{str(path)!r} is not valid JSON ({error}); give --out another file") from None
    if not isinstance(rows, list):
        raise UserError(f"{str(path)!r} holds no list of rows; give --out another file")
    return rows


def _errors(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value or []


def save_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows to a file of ``--out``; rows of the same evaluation, data set and metric are replaced."""

    def key(row: dict[str, Any]) -> tuple:
        return row.get("eval_id"), row.get("dataset"), row.get("metric")

    new = {key(row) for row in rows}
    everything = [row for row in load_rows(path) if key(row) not in new] + [finite(row) for row in rows]
    if path.suffix == ".json":
        write_json(path, everything)
    elif path.suffix == ".jsonl":
        write_rows(path, everything)
    else:
        write_rows(path, [row | {"errors": json.dumps(row.get("errors") or [])} for row in everything])


def finite(row: dict[str, Any]) -> dict[str, Any]:
    """A row with None for numbers that are not finite, as JSON wants it."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def clip_benchmark(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows of one evaluation as the JSON that CLIP_benchmark writes."""
    row = rows[0]
    retrieval = any("recall@" in r["metric"] for r in rows)
    return {
        "dataset": row["dataset"],
        "model": row.get("model"),
        "pretrained": row.get("pretrained"),
        "task": "zeroshot_retrieval" if retrieval else "zeroshot_classification",
        "metrics": {_CLIP_BENCHMARK.get(r["metric"], r["metric"]): r["value"] for r in rows},
        "language": "en",
    }
