"""Zero-shot classification (and the door to retrieval): rows for one model on one data set."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_linear import provenance
from clip_linear.errors import RunError, UserError
from clip_linear_eval.classnames import text_hash
from clip_linear_eval.datasets import EvalSet, Source, open_source, resolve
from clip_linear_eval.features import check_precision, decode_workers, inference
from clip_linear_eval.results import make_row

if TYPE_CHECKING:
    from torch import Tensor, nn

    from clip_linear_eval.scores import Scores

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Settings:
    """How to evaluate; every field that changes a number goes into the rows' ``eval_id``."""

    dataset_type: str = "auto"
    classnames: Any = None
    templates: Any = None
    batch_size: int = 64
    precision: str = "fp32"
    device: str = "cpu"
    limit: int | None = None
    on_error: str = "fail"
    restrict: bool = False
    labels: str | None = None
    split: str = "test"
    ks: tuple[int, ...] = (1, 5)
    workers: int | None = None
    cache: Path | None = None
    rank: int = 0
    world_size: int = 1

    def check(self) -> None:
        """Raise UserError for values that mean nothing."""
        self.precision = check_precision(self.precision)
        if self.on_error not in ("skip", "fail"):
            raise UserError(f"--on-error {self.on_error!r} is neither skip nor fail")
        if self.batch_size < 1 or (self.limit is not None and self.limit < 1):
            raise UserError("--batch-size and --limit must be 1 or more")


@dataclass(kw_only=True)
class Evaluation:
    """The rows of one evaluation and what the page, the predictions file and comparisons need."""

    rows: list[dict[str, Any]]
    data: EvalSet | None = None  # None for retrieval
    scores: Scores | None = None
    notes: list[str] = field(default_factory=list)


def evaluate(
    model: nn.Module,
    preprocess: Callable[[Any], Tensor],
    tokenizer: Any,
    dataset: str | Path,
    *,
    dataset_type: str = "auto",
    classnames: Any = None,
    templates: Any = None,
    batch_size: int = 64,
    precision: str = "fp32",
    device: str = "cpu",
    limit: int | None = None,
    on_error: str = "fail",
    rank: int = 0,
    world_size: int = 1,
    info: dict[str, Any] | None = None,
    **more: Any,
) -> list[dict[str, Any]]:
    """Rows of a model on one data set, on all ranks the same (counts are exact for any world size).

    ``classnames`` and ``templates`` override the set's own files: a list, a dictionary, a file or a built-in name.
    ``info`` holds columns that are put into every row (model, run_id, …); ``more`` are further fields of Settings.
    The model's training mode and the global random state are left as they were. Raises UserError for data that
    cannot be scored honestly, RunError for an unreadable image (``on_error="fail"``).
    """
    settings = Settings(
        dataset_type=dataset_type,
        classnames=classnames,
        templates=templates,
        batch_size=batch_size,
        precision=precision,
        device=device,
        limit=limit,
        on_error=on_error,
        rank=rank,
        world_size=world_size,
        **more,
    )
    return measure(model, preprocess, tokenizer, dataset, settings, info=info).rows


def measure(
    model: nn.Module,
    preprocess: Callable[[Any], Tensor],
    tokenizer: Any,
    dataset: str | Path,
    settings: Settings,
    *,
    info: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """As ``evaluate``, with the predictions kept. Raises UserError and RunError."""
    settings.check()
    source = open_source(dataset, settings.dataset_type, split=settings.split, labels=settings.labels)
    if source.faults and settings.on_error == "fail":
        first = source.faults[0]
        raise RunError(f"{first['file']}: {first['reason']}; mend it, or count such samples with --on-error skip")
    if source.captions is not None and source.targets is None:
        from clip_linear_eval.retrieval import measure_retrieval

        return measure_retrieval(model, preprocess, tokenizer, source, settings, info=info, progress=progress)
    return _classify(model, preprocess, tokenizer, source, settings, info or {}, progress)


def _classify(
    model: nn.Module,
    preprocess: Callable[[Any], Tensor],
    tokenizer: Any,
    source: Source,
    settings: Settings,
    info: dict[str, Any],
    progress: Callable[[int, int], None],
) -> Evaluation:
    from clip_linear_eval.classifier import build_classifier
    from clip_linear_eval.scores import score

    data = resolve(source, settings.classnames, settings.templates, settings.restrict, settings.labels)
    data = data.limited(settings.limit)
    start = time.perf_counter()
    with inference(model, settings.precision, settings.device):
        classifier = build_classifier(
            model,
            tokenizer,
            data.names,
            data.templates,
            precision=settings.precision,
            device=settings.device,
            cache=settings.cache,
            rank=settings.rank,
            world_size=settings.world_size,
        )
        built = time.perf_counter() - start
        scores = score(
            model,
            preprocess,
            data,
            classifier,
            batch_size=settings.batch_size,
            precision=settings.precision,
            device=settings.device,
            on_error=settings.on_error,
            keep=max(*settings.ks, 5),
            workers=decode_workers(settings.workers),
            rank=settings.rank,
            world_size=settings.world_size,
            progress=progress,
        )
    rows = _rows(data, scores, settings, {**info, "classifier_s": built})
    return Evaluation(rows=rows, data=data, scores=scores, notes=data.notes)


def _rows(data: EvalSet, scores: Scores, settings: Settings, info: dict[str, Any]) -> list[dict[str, Any]]:
    from clip_linear_eval import metrics

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
    ece = metrics.reliability(scores.confidence, first).ece
    low, high = metrics.ece_interval(scores.confidence, first)
    rows.append(make_row(metric="ece", value=ece, correct=total, ci_low=low, ci_high=high, **common))
    return rows


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
