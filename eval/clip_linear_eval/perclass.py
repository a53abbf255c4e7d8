"""The per-class table: images, right ones and recall of every class, and what it is taken for most."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np

from clip_linear.files import write_text
from clip_linear_eval import metrics
from clip_linear_eval.settings import Evaluation


def table_of(evaluation: Evaluation) -> list[dict[str, Any]]:
    """A dictionary per class that has images: its id, name, n, right ones, recall with Wilson's interval, and the
    class it is most often mistaken for. Empty for retrieval."""
    data, scores = evaluation.data, evaluation.scores
    if data is None or scores is None:
        return []
    labels, first = data.labels[scores.index], scores.correct(data, 1)
    n, right = metrics.class_counts(labels, first, len(data.names))
    predicted = np.where(first, labels, scores.top[:, 0])
    mistaken: dict[int, tuple[int, int]] = {}
    for true, wrong, count in metrics.confused_pairs(labels, predicted, top=len(labels)):
        mistaken.setdefault(true, (wrong, count))
    out = []
    for c in np.flatnonzero(n).tolist():
        low, high = metrics.wilson(int(right[c]), int(n[c]))
        other, count = mistaken.get(c, (-1, 0))
        out.append(
            {
                "dataset": data.name,
                "class": data.classes[c],
                "name": data.names[c],
                "n": int(n[c]),
                "correct": int(right[c]),
                "recall": float(right[c] / n[c]),
                "ci_low": low,
                "ci_high": high,
                "mistaken_for": data.names[other] if count else "",
                "times": count,
            }
        )
    return out


def write_table(path: Path, evaluations: list[Evaluation]) -> None:
    """Write the per-class tables of several evaluations as one CSV."""
    text = io.StringIO()
    writer = None
    for evaluation in evaluations:
        row = evaluation.rows[0]
        fixed = {"model": row.get("model"), "pretrained": row.get("pretrained")}
        for line in table_of(evaluation):
            if writer is None:
                writer = csv.DictWriter(text, [*fixed, *line], lineterminator="\n")
                writer.writeheader()
            writer.writerow(fixed | line)
    write_text(path, text.getvalue())
