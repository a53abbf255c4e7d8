"""The rows of one evaluation: metrics with their intervals, beside the conditions they were measured under."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_linear import provenance
from clip_linear_eval import metrics
from clip_linear_eval.classnames import text_hash
from clip_linear_eval.datasets import EvalSet
from clip_linear_eval.results import make_row
from clip_linear_eval.settings import Settings

if TYPE_CHECKING:
    from clip_linear_eval.scores import Scores


def classification_rows(
    data: EvalSet, scores: Scores, settings: Settings, info: dict[str, Any]
) -> list[dict[str, Any]]:
    """Rows of top-k, mean per-class recall, the hierarchy's where one is given, and ECE; ``info``: further columns."""
    n, classes = len(scores.index), len(data.names)
    first = scores.correct(data, 1)
    # ReaL: an image counts for the class predicted where that is right, else for its first label.
    labels = data.labels[scores.index]
    common = common_columns(settings, scores.seconds, n) | {
        "dataset": data.name,
        "n": n,
        "names": data.names_source,
        "names_hash": text_hash(data.names),
        "templates": data.templates.source,
        "templates_hash": data.templates.hash,
        "n_classes": classes,
        "errors": scores.faults,
        **info,
    }
    rows = []
    for k in settings.ks:
        # As CLIP_benchmark: top-5 of fewer than five classes says nothing.
        if k > 1 and k > classes:
            continue
        right = int(scores.correct(data, k).sum())
        low, high = metrics.wilson(right, n)
        rows.append(make_row(metric=f"top{k}", value=right / n, correct=right, ci_low=low, ci_high=high, **common))
    recall = metrics.mean_per_class_recall(labels, first, classes)
    low, high = metrics.recall_interval(labels, first, classes)
    total = int(first.sum())
    rows.append(
        make_row(metric="mean_per_class_recall", value=recall, correct=total, ci_low=low, ci_high=high, **common)
    )
    rows += _hierarchy_rows(data, labels, first, scores, settings, common)
    ece = metrics.reliability(scores.confidence, first).ece
    low, high = metrics.ece_interval(scores.confidence, first)
    rows.append(make_row(metric="ece", value=ece, correct=total, ci_low=low, ci_high=high, **common))
    return rows


def _hierarchy_rows(
    data: EvalSet, labels: Any, first: Any, scores: Scores, settings: Settings, common: dict[str, Any]
) -> list[dict[str, Any]]:
    """``top1_hierarchical`` (the prediction is the class or lies above or below it) and ``mean_lca_height``."""
    if settings.hierarchy is None:
        return []
    from clip_linear_eval.hierarchy import load_hierarchy

    tree = load_hierarchy(Path(settings.hierarchy), data.classes)
    predicted = np.where(first, labels, scores.top[:, 0])
    related, heights = tree.measure(labels, predicted)
    right = int(related.sum())
    low, high = metrics.wilson(right, len(labels))
    half = 1.96 * float(heights.std(ddof=1)) / len(heights) ** 0.5 if len(heights) > 1 else float("nan")
    mean = float(heights.mean())
    return [
        make_row(
            metric="top1_hierarchical", value=right / len(labels), correct=right, ci_low=low, ci_high=high, **common
        ),
        make_row(
            metric="mean_lca_height",
            value=mean,
            correct=int(first.sum()),
            ci_low=mean - half,
            ci_high=mean + half,
            **{**common, "unit": "levels"},
        ),
    ]


def common_columns(settings: Settings, seconds: float, n: int) -> dict[str, Any]:
    """Columns that all rows of an evaluation share: conditions, device, versions, time."""
    return {
        "unit": "fraction",
        "provenance": "measured",
        "device": device_name(settings.device),
        "versions": provenance.versions_text(),
        "commit": provenance.commit(),
        "date": provenance.date(),
        "precision": settings.precision,
        "seconds": seconds,
        "images_per_s": n / seconds if seconds else None,
        "world_size": settings.world_size,
    }


def device_name(device: str) -> str:
    """The processor's or the GPU's name."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return provenance.cpu_name()
