"""The random state of a rank as tensors and builtins (no numpy scalars: ``weights_only`` refuses them)."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed Python, numpy and torch (all devices), as OpenCLIP's ``random_seed`` does."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def get(device: torch.device) -> dict[str, Any]:
    """The random state of this process."""
    version, internal, gauss = random.getstate()
    drawn: Any = np.random.get_state()
    name, keys, position, has_gauss, cached = drawn
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "numpy": [str(name), keys.tolist(), int(position), int(has_gauss), float(cached)],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def put(state: dict[str, Any], device: torch.device) -> None:
    """Restore what ``get`` returned."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextlib.contextmanager
def untouched(device: torch.device) -> Iterator[None]:
    """Whatever the block draws, training draws the same numbers after it as without it."""
    state = get(device)
    try:
        yield
    finally:
        put(state, device)
