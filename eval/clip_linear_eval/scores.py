"""Scoring images with a classifier: what is kept of every image, exact over any number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_linear.errors import RunError
from clip_linear_eval.datasets.base import EvalSet
from clip_linear_eval.features import Batcher, bare, image_batches, input_dtype, normalized

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(kw_only=True)
class Scores:
    """Per scored image, in the order of the set: its index, the columns of its highest logits, confidence (softmax
    of the first at the model's temperature) and margin (first minus second cosine similarity)."""

    index: np.ndarray  # [n]
    top: np.ndarray  # [n, K]
    confidence: np.ndarray  # [n]
    margin: np.ndarray  # [n]
    faults: list[dict[str, str]]
    seconds: float

    def correct(self, data: EvalSet, k: int) -> np.ndarray:
        """Whether one of the first k columns is right, boolean [n]."""
        top = self.top[:, :k]
        if data.positives is None:
            return (top == data.labels[self.index][:, None]).any(1)
        return np.array([bool(set(row) & set(data.positives[i])) for i, row in zip(self.index, top.tolist())], bool)


def score(
    model: nn.Module,
    preprocess: Callable[[Any], Tensor],
    data: EvalSet,
    classifier: Tensor,
    *,
    batch_size: int,
    precision: str,
    device: str,
    on_error: str,
    keep: int = 5,
    workers: int = 2,
    rank: int = 0,
    world_size: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Scores:
    """Score every image of a set; call it inside ``features.inference``.

    Whole batches are dealt out to the ranks, so every batch is computed as one process would compute it and the
    gathered result is equal bit for bit. Raises RunError on all ranks for a bad image when ``on_error`` is ``fail``.
    """
    start = time.perf_counter()
    tower = bare(model)
    batches = [list(range(i, min(i + batch_size, len(data.files)))) for i in range(0, len(data.files), batch_size)]
    dtype, scale = input_dtype(precision), temperature(tower)
    run = Batcher(lambda images: normalized(tower.encode_image(images)))
    keep = min(keep, classifier.shape[1])
    parts: list[tuple[np.ndarray, ...]] = []
    bad: dict[int, str] = {}
    done = 0
    mine = batches[rank::world_size]
    for indices, images, faults in image_batches(data.read, mine, preprocess, border=data.border, workers=workers):
        bad |= faults
        done += len(indices) + len(faults)
        if images is not None:
            images = images.to(device=device, dtype=dtype, non_blocking=True)
            parts.append((np.array(indices), *_best(run(images), classifier, scale, keep)))
        progress(done, sum(map(len, mine)))
        if bad and on_error == "fail":
            break
    results = gather_objects((parts, bad), world_size)
    bad = {i: reason for _, other in results for i, reason in other.items()}
    if bad and on_error == "fail":
        first = min(bad)
        raise RunError(f"{data.files[first]}: {bad[first]}; mend it, or count such images with --on-error skip")
    rows = [part for other, _ in results for part in other]
    if not rows:
        raise RunError(f"no image of {data.name!r} could be read; first reason: {next(iter(bad.values()), 'none')}")
    index, top, confidence, margin = (np.concatenate(column) for column in zip(*rows))
    order = np.argsort(index)
    return Scores(
        index=index[order],
        top=top[order],
        confidence=confidence[order],
        margin=margin[order],
        faults=[*data.faults, *({"file": data.files[i], "reason": bad[i]} for i in sorted(bad))],
        seconds=time.perf_counter() - start,
    )


def temperature(model: Any) -> float:
    """What the model multiplies cosine similarities by; 100 (CLIP's cap) for a model that has no logit_scale."""
    scale = getattr(model, "logit_scale", None)
    return 100.0 if scale is None else float(scale.detach().float().exp().max())


def _best(features: Tensor, classifier: Tensor, scale: float, keep: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(columns of the highest similarities [B, K], confidence [B], margin [B]) of one batch, in float32."""
    import torch

    with torch.autocast(features.device.type, enabled=False):
        # OpenCLIP and CLIP_benchmark rank 100·cosine; the same product keeps the same order among near ties.
        logits = 100.0 * features @ classifier  # [B, C]
        best, top = logits.topk(max(keep, min(2, logits.shape[1])), dim=1)
        confidence = (logits * (scale / 100.0)).softmax(1).amax(1)
    margin = (best[:, 0] - best[:, min(1, best.shape[1] - 1)]) / 100.0
    return top[:, :keep].cpu().numpy(), confidence.cpu().numpy(), margin.cpu().numpy()


def gather_objects(mine: Any, world_size: int) -> list[Any]:
    """What every rank holds, in the order of the ranks, on every rank."""
    if world_size == 1:
        return [mine]
    import torch.distributed as dist

    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, mine)
    return everyone
