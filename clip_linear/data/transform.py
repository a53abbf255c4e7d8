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
        self.single, self.tables = split_transform(preprocess)

    def __call__(self, pair: Encoded, key: str) -> Prepared:
        """Decode and transform; the random draws of the transform are a function of ``key``. Raises BadImageError."""
        image = decode_image(pair.image, max_pixels=self.max_pixels, max_aspect=self.max_aspect, at_least=self.at_least)
        seed_all(draw(key, "transform"))
        result = self.single(image)
        if self.tables is not None:
            result = np.asarray(result)
        return Prepared(result, pair.caption(key))

    def batch(self, pairs: Sequence[Prepared]) -> tuple[Tensor, Tensor]:
        """Images [B, 3, H, W] float32 and texts [B, L] int64; bit for bit what the transform gives one by one."""
        texts = self.tokenizer([p.caption for p in pairs])
        cache = getattr(self.tokenizer, "cache", None)
        if isinstance(cache, dict) and len(cache) > _MAX_CACHED_WORDS:
            for word in list(cache)[_MAX_CACHED_WORDS // 2 :]:  # the special tokens stand first and stay
                del cache[word]
        if self.tables is None:
            return torch.stack([p.image for p in pairs]), texts
        height, width = pairs[0].image.shape[:2]
        images = np.empty((len(pairs), 3, height, width), np.float32)
        for image, pair in zip(images, pairs):
            for channel, table in enumerate(self.tables):
                np.take(table, pair.image[:, :, channel], out=image[channel], mode="clip")  # clip: no buffered copy
        return torch.from_numpy(images), texts


def split_transform(preprocess: Any) -> tuple[Any, list[np.ndarray] | None]:
    """Take ToTensor and Normalize off the end of a transform: of 256 pixel values they make 256 numbers a channel.

    Returns the rest and one table [256] float32 for each channel, or the transform as it is and None.
    """
    steps = list(getattr(preprocess, "transforms", ()))
    if type(preprocess) is not transforms.Compose or len(steps) < 3:
        return preprocess, None
    to_tensor, normalize = steps[-2:]
    if not isinstance(to_tensor, transforms.ToTensor) or not isinstance(normalize, transforms.Normalize):
        return preprocess, None
    if len(normalize.mean) != 3 or len(normalize.std) != 3:
        return preprocess, None
    every = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2)  # [16, 16, 3]
    tables = normalize(transforms.ToTensor()(every)).reshape(3, 256).numpy()
    return transforms.Compose(steps[:-2]), list(np.ascontiguousarray(tables))


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
