"""An exponential moving average of the weights (an extra; OpenCLIP has none)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from clip_linear.train.wrap import as_saved, like


class Ema:
    """Float copies of the trained parameters, moved by ``decay`` towards the model after each step."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.names = [n for n, p in model.named_parameters() if p.requires_grad]
        self.live = [p for p in model.parameters() if p.requires_grad]
        self.average = [p.detach().clone() for p in self.live]

    @torch.no_grad()
    def update(self) -> None:
        """average ← decay · average + (1 − decay) · weights."""
        torch._foreach_lerp_(self.average, [p.detach() for p in self.live], 1 - self.decay)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model has the averaged weights inside the block."""
        kept = [p.detach().clone() for p in self.live]
        self._put(self.average)
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.live, values):
            parameter.copy_(value)

    def full(self) -> dict[str, Tensor]:
        """The averaged weights as one process would have them (a collective under FSDP)."""
        return {name: as_saved(name, value) for name, value in zip(self.names, self.average)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take the averages of a checkpoint."""
        for name, value in zip(self.names, self.average):
            value.copy_(like(value, state[name]))
