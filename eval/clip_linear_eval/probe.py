"""Linear probe and nearest neighbours on frozen features, with a validation split out of the training set."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_linear.errors import RunError, UserError
from clip_linear_eval import metrics
from clip_linear_eval.datasets import Source, evenly, open_source
from clip_linear_eval.features import Batcher, bare, decode_workers, image_batches, inference, input_dtype, normalized
from clip_linear_eval.results import make_row
from clip_linear_eval.rows import common_columns
from clip_linear_eval.settings import Evaluation, Settings

if TYPE_CHECKING:
    from torch import Tensor, nn

KINDS = ("linear", "knn")
_VALIDATION = 5  # every fifth image of a class chooses the one hyper-parameter
_STRENGTHS = tuple(10.0**e for e in range(-3, 4))  # C of the logistic regression, on features of length √D
_NEIGHBOURS = (1, 5, 10, 20)
_KNN_TEMPERATURE = 0.07  # weight of a neighbour exp(cosine / 0.07), as DINO's kNN (Caron et al. 2021, appendix F)


def measure_probe(
    kind: str,
    model: nn.Module,
    preprocess: Callable[[Any], Tensor],
    train: str | Path,
    test: str | Path,
    settings: Settings,
    *,
    info: dict[str, Any] | None = None,
) -> Evaluation:
    """A row ``linear_probe_top1`` or ``knn_top1``: fitted on ``train``, scored on ``test``.

    The hyper-parameter (C, or the number of neighbours) is chosen on a fifth of each class of ``train``, never on
    ``test``; then all of ``train`` is used. Classes are matched by their ids. Raises UserError and RunError.
    """
    settings.check()
    if kind not in KINDS:
        raise UserError(f"--probe {kind!r} is neither linear nor knn")
    if settings.world_size > 1:
        raise UserError("probes run on one process; leave torchrun out")
    start = time.perf_counter()
    sets = []
    for path in (train, test):
        source = open_source(path, settings.dataset_type, split=settings.split if path == test else "train")
        if source.targets is None:
            raise UserError(f"{str(path)!r} has captions but no classes; a probe needs classes")
        sets.append((source, *_features(model, preprocess, source, settings)))
    (_, x_train, y_train, bad_train), (source, x, y, bad) = sets
    strange = sorted(set(y) - set(y_train))
    if strange:
        raise UserError(
            f"classes of {str(test)!r} that {str(train)!r} lacks: {', '.join(repr(str(c)) for c in strange[:10])}"
        )
    fit = _fit_linear if kind == "linear" else _fit_knn
    held = _held_out(y_train)
    candidates = _STRENGTHS if kind == "linear" else _NEIGHBOURS
    scored = [
        float(np.mean(fit(x_train[~held], y_train[~held], x_train[held], c) == y_train[held])) for c in candidates
    ]
    chosen = candidates[int(np.argmax(scored))]
    correct = fit(x_train, y_train, x, chosen) == y
    right, n = int(correct.sum()), len(y)
    low, high = metrics.wilson(right, n)
    common = common_columns(settings, time.perf_counter() - start, n)
    row = make_row(
        **common,
        dataset=source.name,
        metric="linear_probe_top1" if kind == "linear" else "knn_top1",
        value=right / n,
        n=n,
        ci_low=low,
        ci_high=high,
        correct=right,
        n_train=len(y_train),
        chosen=chosen,
        validation=max(scored),
        errors=[*bad_train, *bad],
        **(info or {}),
    )
    return Evaluation(rows=[row])


def _features(
    model: nn.Module, preprocess: Callable[[Any], Tensor], source: Source, settings: Settings
) -> tuple[np.ndarray, np.ndarray, list[dict[str, str]]]:
    """(unit features [n, D], class ids [n], faults) of a source."""
    chosen, size = evenly(len(source.files), settings.limit), settings.batch_size
    batches = [chosen[i : i + size] for i in range(0, len(chosen), size)]
    tower, dtype = bare(model), input_dtype(settings.precision)
    run = Batcher(lambda x: normalized(tower.encode_image(x)))
    parts, kept, bad = [], [], dict[int, str]()
    with inference(model, settings.precision, settings.device):
        workers = decode_workers(settings.workers)
        for indices, images, faults in image_batches(
            source.read, batches, preprocess, border=source.border, workers=workers
        ):
            bad |= faults
            if bad and settings.on_error == "fail":
                first = min(bad)
                raise RunError(f"{source.files[first]}: {bad[first]}; mend it, or give --on-error skip")
            if images is not None:
                parts.append(run(images.to(device=settings.device, dtype=dtype)).cpu().numpy())
                kept += indices
    if not parts:
        raise RunError(f"no image of {source.name!r} could be read")
    targets = source.targets or ()
    faults_list = [*source.faults, *({"file": source.files[i], "reason": bad[i]} for i in sorted(bad))]
    return np.concatenate(parts), np.array([targets[i] for i in kept]), faults_list


def _held_out(y: np.ndarray) -> np.ndarray:
    """Every fifth image of each class, boolean [n]; a class of fewer than two images stays in training."""
    held = np.zeros(len(y), bool)
    for name in np.unique(y):
        where = np.random.default_rng(0).permutation(np.flatnonzero(y == name))
        held[where[: len(where) // _VALIDATION or int(len(where) > 1)]] = True
    if not held.any():
        raise UserError("the training set has one image per class: nothing is left to choose a hyper-parameter on")
    return held


def _fit_linear(x: np.ndarray, y: np.ndarray, queries: np.ndarray, strength: float) -> np.ndarray:
    try:
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise UserError("--probe linear needs scikit-learn; run: pip install 'clip-linear[eval]'") from None

    scale = x.shape[1] ** 0.5  # unit vectors have tiny coordinates; this keeps the strengths about one
    model = LogisticRegression(C=strength, max_iter=1000).fit(x * scale, y)
    return model.predict(queries * scale)


def _fit_knn(x: np.ndarray, y: np.ndarray, queries: np.ndarray, neighbours: float) -> np.ndarray:
    classes, index = np.unique(y, return_inverse=True)
    k = min(int(neighbours), len(x))
    out = []
    for start in range(0, len(queries), 1024):
        cosine = queries[start : start + 1024] @ x.T
        nearest = np.argpartition(-cosine, k - 1, axis=1)[:, :k]
        weight = np.exp(np.take_along_axis(cosine, nearest, 1) / _KNN_TEMPERATURE)
        votes = np.zeros((len(cosine), len(classes)))
        np.add.at(votes, (np.arange(len(cosine))[:, None], index[nearest]), weight)
        out.append(classes[votes.argmax(1)])
    return np.concatenate(out)
