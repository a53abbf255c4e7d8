"""Pairs to tensors: OpenCLIP's own transform and tokenizer, with random draws that depend on the sample alone."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision import transforms

from clip_linear.data.config import DataConfig
from clip_linear.data.decode import decode_image
from clip_linear.data.order import draw
from clip_linear.data.samples import Encoded
from clip_linear.data.stream import Prepared

_MAX_CACHED_WORDS = 200_000  # OpenCLIP's tokenizer keeps every word that it ever saw


class Prepare:
    """Decodes and transforms one pair, and puts pairs together to a batch. Picklable if its two tools are."""

    def __init__(self, preprocess: Any, tokenizer: Any, config: DataConfig) -> None:
        self.tokenizer = tokenizer
        self.max_pixels = config.max_image_pixels
        self.max_aspect = config.max_aspect
        self.at_least = 2 * target_side(preprocess) if config.draft else 0
        self.single, self.normalize = split_transform(preprocess)

    def __call__(self, pair: Encoded, key: str) -> Prepared:
        """Decode and transform; the random draws of the transform are a function of ``key``. Raises BadImageError."""
        image = decode_image(pair.image, max_pixels=self.max_pixels, max_aspect=self.max_aspect, at_least=self.at_least)
        seed_all(draw(key, "transform"))
        result = self.single(image)
        if self.normalize is not None:
            result = np.asarray(result)
        return Prepared(result, pair.caption(key))

    def batch(self, pairs: Sequence[Prepared]) -> tuple[Tensor, Tensor]:
        """Images [B, 3, H, W] float32 and texts [B, L] int64; bit for bit what the transform gives one by one."""
        texts = self.tokenizer([p.caption for p in pairs])
        cache = getattr(self.tokenizer, "cache", None)
        if isinstance(cache, dict) and len(cache) > _MAX_CACHED_WORDS:
            for word in list(cache)[_MAX_CACHED_WORDS // 2 :]:  # the special tokens stand first and stay
                del cache[word]
        if self.normalize is None:
            return torch.stack([p.image for p in pairs]), texts
        mean, std = self.normalize
        pixels = torch.from_numpy(np.stack([p.image for p in pairs])).permute(0, 3, 1, 2)  # [B, 3, H, W]
        images = pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
        return images.sub_(mean).div_(std), texts


def split_transform(preprocess: Any) -> tuple[Any, tuple[Tensor, Tensor] | None]:
    """Part a transform that ends with ToTensor and Normalize, so that these two run once for the whole batch."""
    steps = list(getattr(preprocess, "transforms", ()))
    if type(preprocess) is not transforms.Compose or len(steps) < 3:
        return preprocess, None
    to_tensor, normalize = steps[-2:]
    if not isinstance(to_tensor, transforms.ToTensor) or not isinstance(normalize, transforms.Normalize):
        return preprocess, None
    mean = torch.as_tensor(normalize.mean, dtype=torch.float32).view(1, -1, 1, 1)
    std = torch.as_tensor(normalize.std, dtype=torch.float32).view(1, -1, 1, 1)
    if mean.shape[1] != 3 or std.shape[1] != 3:
        return preprocess, None
    return transforms.Compose(steps[:-2]), (mean, std)


def target_side(preprocess: Any) -> int:
    """Pixels that the shorter side must have so that the transform still shrinks: its output over its smallest crop.

    0 when the transform is not understood (no size, or a random crop whose smallest scale is not known).
    """
    for step in getattr(preprocess, "transforms", ()):
        size = getattr(step, "size", None)
        if size is None:
            continue
        longest = max(size) if isinstance(size, list | tuple) else int(size)
        if not isinstance(step, transforms.RandomResizedCrop):
            return longest
        # A crop of area s·W·H and aspect up to r has a shorter side of at least sqrt(s/r) of the image's.
        smallest = step.scale[0] / max(step.ratio[1], 1 / step.ratio[0])
        return math.ceil(longest / math.sqrt(smallest)) if smallest > 0 else 0
    return 0


def seed_all(seed: int) -> None:
    """Seed the generators that transforms draw from: torch's CPU one, Python's and numpy's."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def own_randomness() -> Iterator[None]:
    """Leave the process's generators as they were: what is drawn inside does not disturb them."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
