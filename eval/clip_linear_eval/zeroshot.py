"""Zero-shot classification (and the door to retrieval): rows for one model on one data set."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_linear.errors import RunError
from clip_linear_eval.datasets import EvalSet, Source, open_source, resolve
from clip_linear_eval.features import decode_workers, inference
from clip_linear_eval.rows import classification_rows
from clip_linear_eval.settings import Evaluation, Settings

if TYPE_CHECKING:
    from torch import Tensor, nn


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
    done: Callable[[str], list[dict[str, Any]]] | None = None,
) -> Evaluation:
    """As ``evaluate``, with the predictions kept. ``done``, where given, is asked for rows that already stand for an
    ``eval_id``; the rows then carry theirs. Raises UserError and RunError."""
    settings.check()
    source = open_source(dataset, settings.dataset_type, split=settings.split, labels=settings.labels)
    if source.faults and settings.on_error == "fail":
        first = source.faults[0]
        raise RunError(f"{first['file']}: {first['reason']}; mend it, or count such samples with --on-error skip")
    data: EvalSet | Source = source
    if source.targets is not None:
        data = resolve(source, settings.classnames, settings.templates, settings.restrict, settings.labels)
        data = data.limited(settings.limit)
    info = dict(info or {})
    if done is not None:
        from clip_linear_eval.identity import eval_id
        from clip_linear_eval.scores import gather_objects

        info["eval_id"] = eval_id(model, preprocess, tokenizer, data, settings)
        # Rank 0 decides for all: the others may not see its files.
        rows = gather_objects(done(info["eval_id"]), settings.world_size)[0]
        if rows:
            return Evaluation(rows=rows, notes=["already done; delete its rows in --out to do it again"])
    if isinstance(data, EvalSet):
        return _classify(model, preprocess, tokenizer, data, settings, info, progress)
    from clip_linear_eval.retrieval import measure_retrieval

    return measure_retrieval(model, preprocess, tokenizer, data, settings, info=info, progress=progress)


def evaluate_checkpoint(
    model: str | None, pretrained: str | None, dataset: str | Path, *, device: str = "cpu", **settings: Any
) -> list[dict[str, Any]]:
    """Rows of what ``--model`` and ``--pretrained`` name (see ``models.load``) on one data set, on one process.

    ``settings`` are fields of Settings. Raises UserError and RunError.
    """
    from clip_linear_eval.models import load

    chosen = Settings(device=device, **settings)
    loaded = load(model, pretrained, precision=chosen.precision, device=device)
    return measure(loaded.model, loaded.preprocess, loaded.tokenizer, dataset, chosen, info=loaded.info).rows


def _classify(
    model: nn.Module,
    preprocess: Callable[[Any], Tensor],
    tokenizer: Any,
    data: EvalSet,
    settings: Settings,
    info: dict[str, Any],
    progress: Callable[[int, int], None],
) -> Evaluation:
    from clip_linear_eval.classifier import build_classifier
    from clip_linear_eval.scores import score

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
    rows = classification_rows(data, scores, settings, {**info, "classifier_s": built})
    notes, chance = list(data.notes), 1 / len(data.names)
    if len(data.names) > 1 and rows[0]["n"] >= 100 and rows[0]["ci_low"] <= chance:
        notes.append(f"top-1 may be chance ({100 * chance:.2f} %): is this the model, and are these the names?")
    return Evaluation(rows=rows, data=data, scores=scores, notes=notes)
