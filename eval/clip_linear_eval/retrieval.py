"""Image→text and text→image retrieval: recall at k, any of an image's captions counting, memory linear in N."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_linear.errors import RunError
from clip_linear_eval import metrics
from clip_linear_eval.classnames import text_hash
from clip_linear_eval.datasets import Source, evenly
from clip_linear_eval.features import (
    Batcher,
    bare,
    decode_workers,
    image_batches,
    inference,
    input_dtype,
    normalized,
)
from clip_linear_eval.results import make_row
from clip_linear_eval.rows import common_columns
from clip_linear_eval.scores import gather_objects
from clip_linear_eval.settings import Evaluation, Settings
from clip_linear_eval.texts import encode_sorted, text_encoder
from clip_linear_eval.tokens import tokens_of

if TYPE_CHECKING:
    from torch import Tensor, nn


KS = (1, 5, 10)
_ROWS, _COLUMNS, _TEXTS = 1024, 65536, 8192


def measure_retrieval(
    model: nn.Module,
    preprocess: Callable[[Any], Tensor],
    tokenizer: Any,
    source: Source,
    settings: Settings,
    *,
    info: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Rows ``image_to_text_recall@k`` and ``text_to_image_recall@k`` for k in 1, 5, 10.

    As the papers count (and unlike a true recall): an image is right when any of its captions is among the first k
    texts; a text when its image is among the first k images. Images that cannot be read leave with their captions.
    Raises RunError for one of those where ``on_error`` is ``fail``.
    """
    captions = source.captions or []
    chosen = evenly(len(captions), settings.limit)
    start = time.perf_counter()
    with inference(model, settings.precision, settings.device):
        images, kept, faults = _encode_images(bare(model), preprocess, source, chosen, settings, progress)
        texts = [caption for i in kept for caption in captions[i]]
        owner = np.repeat(np.arange(len(kept)), [len(captions[i]) for i in kept])
        features = _encode_texts(bare(model), tokenizer, texts, settings)
        ranks = recall(images, features, owner, rank=settings.rank, world_size=settings.world_size)
    seconds = time.perf_counter() - start
    common = common_columns(settings, seconds, len(kept)) | {
        "dataset": source.name,
        "names_hash": text_hash(texts),
        "templates_hash": None,
        "n_images": len(kept),
        "n_captions": len(texts),
        "errors": [*source.faults, *faults],
        **(info or {}),
    }
    rows = []
    for direction, n in (("image_to_text", len(kept)), ("text_to_image", len(texts))):
        for k in KS:
            right = ranks[direction, k]
            low, high = metrics.wilson(right, n)
            rows.append(
                make_row(
                    metric=f"{direction}_recall@{k}",
                    value=right / n,
                    correct=right,
                    n=n,
                    ci_low=low,
                    ci_high=high,
                    **common,
                )
            )
    return Evaluation(rows=rows)


def _encode_images(
    model: Any,
    preprocess: Callable[[Any], Tensor],
    source: Source,
    chosen: list[int],
    settings: Settings,
    progress: Callable[[int, int], None],
) -> tuple[Tensor, list[int], list[dict[str, str]]]:
    """(features [n, D], indices that could be read, faults), the same on all ranks."""
    import torch

    size = settings.batch_size
    mine = [chosen[i : i + size] for i in range(0, len(chosen), size)][settings.rank :: settings.world_size]
    run, dtype = Batcher(lambda x: normalized(model.encode_image(x))), input_dtype(settings.precision)
    parts: dict[int, np.ndarray] = {}
    bad: dict[int, str] = {}
    for indices, images, faults in image_batches(
        source.read, mine, preprocess, border=source.border, workers=decode_workers(settings.workers)
    ):
        bad |= faults
        if images is not None:
            features = run(images.to(device=settings.device, dtype=dtype)).cpu().numpy()
            parts |= dict(zip(indices, features))
        progress(len(parts) + len(bad), sum(map(len, mine)))
        if bad and settings.on_error == "fail":
            break
    everyone = gather_objects((parts, bad), settings.world_size)
    parts = {i: feature for other, _ in everyone for i, feature in other.items()}
    bad = {i: reason for _, other in everyone for i, reason in other.items()}
    if bad and settings.on_error == "fail":
        first = min(bad)
        raise RunError(f"{source.files[first]}: {bad[first]}; mend it, or count such images with --on-error skip")
    if not parts:
        raise RunError(f"no image of {source.name!r} could be read")
    kept = sorted(parts)
    stacked = torch.from_numpy(np.stack([parts[i] for i in kept])).to(settings.device)
    return stacked, kept, [{"file": source.files[i], "reason": bad[i]} for i in sorted(bad)]


def _encode_texts(model: Any, tokenizer: Any, texts: Sequence[str], settings: Settings) -> Tensor:
    """Features of all texts [M, D]; runs of texts are dealt out to the ranks."""
    import torch

    encode = text_encoder(model, tokenizer, list(texts[:4]))
    parts = {}
    for number, start in enumerate(range(0, len(texts), _TEXTS)):
        if number % settings.world_size == settings.rank:
            tokens = tokens_of(tokenizer, texts[start : start + _TEXTS], settings.cache)
            parts[start] = encode_sorted(encode, tokens, settings.device).cpu().numpy()
    everyone = gather_objects(parts, settings.world_size)
    merged = {start: part for other in everyone for start, part in other.items()}
    return torch.from_numpy(np.concatenate([merged[start] for start in sorted(merged)])).to(settings.device)


def recall(
    images: Tensor, texts: Tensor, owner: np.ndarray, *, rank: int = 0, world_size: int = 1
) -> dict[tuple[str, int], int]:
    """How many queries are right at k, per direction: images [N, D], texts [M, D], owner [M] the image of a text."""
    import torch

    owners = torch.from_numpy(owner).to(images.device)
    own = torch.arange(len(images), device=images.device)
    right: dict[tuple[str, int], int] = {}
    for direction, queries, gallery, wanted, found in (
        ("image_to_text", images, texts, own, owners),
        ("text_to_image", texts, images, owners, own),
    ):
        counts = np.zeros(len(KS), dtype=np.int64)
        for start in range(rank * _ROWS, len(queries), world_size * _ROWS):
            block = queries[start : start + _ROWS]
            hit = found[_nearest(block, gallery, max(KS))] == wanted[start : start + _ROWS, None]  # [b, 10]
            counts += [int(hit[:, :k].any(1).sum()) for k in KS]
        total = sum(gather_objects(counts, world_size))
        right |= {(direction, k): int(total[i]) for i, k in enumerate(KS)}
    return right


def _nearest(queries: Tensor, gallery: Tensor, k: int) -> Tensor:
    """Indices of the k most similar gallery items, [b, k], looking at a fixed number of them at a time."""
    import torch

    best, where = None, None
    for start in range(0, len(gallery), _COLUMNS):
        similar = queries @ gallery[start : start + _COLUMNS].T
        values, indices = similar.topk(min(k, similar.shape[1]), dim=1)
        indices = indices + start
        if best is not None and where is not None:
            values, indices = torch.cat([best, values], 1), torch.cat([where, indices], 1)
            values, order = values.topk(min(k, values.shape[1]), dim=1)
            indices = indices.gather(1, order)
        best, where = values, indices
    assert where is not None, "the gallery is not empty"
    return where
