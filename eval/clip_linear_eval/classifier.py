"""The zero-shot classifier: one unit vector per class, the mean of its prompts' text features.

Prompts are tokenised once (cached on disk), sorted by length inside fixed chunks of classes, and encoded only as far
as their last token where the text tower is causal, which is exact; this is checked on real prompts each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_linear_eval.classnames import text_hash
from clip_linear_eval.datasets.base import digest
from clip_linear_eval.features import bare, normalized
from clip_linear_eval.prompts import Templates
from clip_linear_eval.texts import encode_sorted, text_encoder
from clip_linear_eval.tokens import tokenizer_key, tokens_of

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

_CHUNK_PROMPTS = 8192  # prompts encoded at a time; fixed, so that results do not depend on the world size


def build_classifier(
    model: nn.Module,
    tokenizer: Any,
    names: Sequence[str],
    templates: Templates,
    *,
    precision: str = "fp32",
    device: str = "cpu",
    cache: Path | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Tensor:
    """The classifier [D, C] in float32 on ``device``; call it inside ``features.inference``.

    Chunks of classes are dealt out to the ranks and summed, which is exact (every other rank adds zeros). ``cache``:
    a folder for tokenised prompts and for the result, keyed by the text tower's weights, names and templates.
    """
    import torch
    from safetensors.torch import load_file, save_file

    model = bare(model)
    stored = None
    if cache is not None:
        key = digest(text_weights_hash(model), text_hash(names), templates.hash, precision, tokenizer_key(tokenizer))
        stored = cache / "classifiers" / f"{key}.safetensors"
        if stored.is_file():
            return load_file(stored)["classifier"].to(device)
    chunks = _chunks(names, templates)
    encode = text_encoder(model, tokenizer, [templates.prompts(name)[0] for name in names[:4]])
    parts: Tensor | None = None
    for number, (start, chunk) in enumerate(chunks):
        if number % world_size != rank:
            continue
        part = _encode_chunk(
            encode,
            tokens_of(tokenizer, [p for n in chunk for p in templates.prompts(n)], cache),
            chunk,
            templates,
            device,
        )
        parts = torch.zeros(len(names), part.shape[1], device=device) if parts is None else parts
        parts[start : start + len(chunk)] = part
    if world_size > 1:
        parts = _sum_ranks(parts, len(names), device)
    assert parts is not None, "there is at least one class"
    classifier = parts.T.contiguous()
    if stored is not None and rank == 0:
        from clip_linear.files import replacing

        with replacing(stored) as temporary:
            save_file({"classifier": classifier.cpu()}, temporary)
    return classifier


def _sum_ranks(parts: Tensor | None, classes: int, device: str) -> Tensor:
    import torch
    import torch.distributed as dist

    width = torch.tensor([0 if parts is None else parts.shape[1]], device=device)
    dist.all_reduce(width, op=dist.ReduceOp.MAX)
    total = torch.zeros(classes, int(width.item()), device=device) if parts is None else parts
    dist.all_reduce(total)
    return total


def _chunks(names: Sequence[str], templates: Templates) -> list[tuple[int, Sequence[str]]]:
    """Runs of classes with about _CHUNK_PROMPTS prompts in all: (first class, names)."""
    most = max(len(templates.prompts(name)) for name in names) if templates.per_class else len(templates.templates)
    step = max(1, _CHUNK_PROMPTS // most)
    return [(start, names[start : start + step]) for start in range(0, len(names), step)]


def _encode_chunk(
    encode: Callable[[Tensor], Tensor], tokens: np.ndarray, names: Sequence[str], templates: Templates, device: str
) -> Tensor:
    """Unit mean feature per class of a chunk, [C', D]."""
    import torch

    features = encode_sorted(encode, tokens, device)  # [P, D]
    sizes = [len(templates.prompts(name)) for name in names]
    if len(set(sizes)) == 1:
        means = features.view(len(names), sizes[0], -1).mean(1)
    else:
        means = torch.stack([part.mean(0) for part in features.split(sizes)])
    return normalized(means)


def text_weights_hash(model: nn.Module) -> str:
    """Content hash of all weights outside the image tower."""
    return weights_hash(model, lambda name: not name.startswith("visual."))


def weights_hash(model: nn.Module, keep: Callable[[str], bool] = lambda name: True) -> str:
    """Content hash (16 hex digits) of a model's state dict, in any dtype, on any device."""
    import torch

    state = hashlib.sha256()
    for name, value in sorted(bare(model).state_dict().items()):
        if keep(name):
            state.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            state.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()[:16]
