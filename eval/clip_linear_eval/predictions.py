"""One line per image: what was predicted, for tables of one's own and for paired comparison of two models."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from clip_linear.errors import UserError
from clip_linear.files import replacing, write_text
from clip_linear_eval import metrics
from clip_linear_eval.results import make_row
from clip_linear_eval.settings import Evaluation

COLUMNS = ("model", "pretrained", "dataset", "file", "label", "class", "name", "predicted", "predicted_name")
NUMBERS = ("correct", "correct5", "confidence", "margin", "top5")


def lines_of(evaluation: Evaluation) -> list[dict[str, Any]]:
    """A dictionary per scored image; ``label``, ``predicted`` and ``top5`` are columns of the classifier."""
    data, scores = evaluation.data, evaluation.scores
    if data is None or scores is None:
        raise UserError("predictions are written for classification sets; retrieval has none")
    row = evaluation.rows[0]
    fixed = {"model": row.get("model"), "pretrained": row.get("pretrained"), "dataset": row["dataset"]}
    first, five = scores.correct(data, 1), scores.correct(data, 5)
    out = []
    for j, i in enumerate(scores.index.tolist()):
        label, predicted = int(data.labels[i]), int(scores.top[j, 0])
        out.append(
            {
                **fixed,
                "file": data.files[i],
                "label": label,
                "class": data.classes[label],
                "name": data.names[label],
                "predicted": predicted,
                "predicted_name": data.names[predicted],
                "correct": bool(first[j]),
                "correct5": bool(five[j]),
                "confidence": float(scores.confidence[j]),
                "margin": float(scores.margin[j]),
                "top5": [int(k) for k in scores.top[j, :5]],
            }
        )
    return out


def write_predictions(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write lines as parquet or CSV (by the suffix), atomically. Raises UserError."""
    if path.suffix == ".csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, (*COLUMNS, *NUMBERS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(line | {"top5": json.dumps(line["top5"])} for line in lines)
        write_text(path, text.getvalue())
        return
    pq, pa = _pyarrow(path)
    with replacing(path) as temporary:
        pq.write_table(pa.Table.from_pylist(lines), temporary)


def check_path(text: str) -> Path:
    """The path of ``--predictions`` or ``--compare``. Raises UserError where its kind cannot be written here."""
    path = Path(text)
    if path.suffix not in (".parquet", ".csv"):
        raise UserError(f"predictions {text!r}: give a .parquet or .csv file")
    if path.suffix == ".parquet":
        _pyarrow(path)
    return path


def _pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{str(path)!r} needs pyarrow; run: pip install 'clip-linear[parquet]', or give .csv") from None
    return pyarrow.parquet, pyarrow


def read_predictions(path: Path) -> list[dict[str, Any]]:
    """Lines of a predictions file; only what comparisons need is typed. Raises UserError."""
    if not path.is_file():
        raise UserError(f"predictions {str(path)!r} do not exist; write them with --predictions")
    if path.suffix == ".csv":
        with open(path, newline="", encoding="utf-8") as f:
            lines: list[dict[str, Any]] = list(csv.DictReader(f))
        lines = [line | {"correct": line.get("correct") == "True"} for line in lines]
    else:
        lines = _pyarrow(path)[0].read_table(path).to_pylist()
    missing = [c for c in ("dataset", "file", "class", "correct") if lines and c not in lines[0]]
    if missing:
        raise UserError(f"{str(path)!r} lacks the columns {', '.join(missing)}; write it with --predictions")
    return lines


def compare(lines: list[dict[str, Any]], other: list[dict[str, Any]], base: dict[str, Any]) -> dict[str, Any]:
    """A row ``top1_difference`` (these minus the other ones) over the images that both have.

    ``base`` is a row of this evaluation. Raises UserError where the classes of an image differ or nothing is shared.
    """
    before = {line["file"]: line for line in other if line["dataset"] == base["dataset"]}
    shared = [line for line in lines if line["file"] in before]
    if not shared:
        raise UserError(f"the predictions to compare with hold no image of {base['dataset']!r}")
    differ = [line["file"] for line in shared if str(line["class"]) != str(before[line["file"]]["class"])]
    if differ:
        raise UserError(f"{differ[0]!r} has another class in the predictions to compare with; the sets differ")
    a = np.array([before[line["file"]]["correct"] for line in shared], bool)
    b = np.array([line["correct"] for line in shared], bool)
    result = metrics.compare_paired(a, b)
    first = next(iter(before.values()))
    return make_row(
        **{k: v for k, v in base.items() if k not in ("metric", "value", "n", "ci_low", "ci_high", "correct")},
        metric="top1_difference",
        value=result["difference"],
        n=result["n"],
        ci_low=result["ci_low"],
        ci_high=result["ci_high"],
        p_mcnemar=result["p_mcnemar"],
        only_this=result["only_b"],
        only_other=result["only_a"],
        compared_with=first.get("pretrained") or first.get("model"),
        not_shared=len(lines) + len(before) - 2 * len(shared),
    )
