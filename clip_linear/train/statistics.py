"""Running statistics of BatchNorm towers while a batch is seen twice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextlib.contextmanager
def still_statistics(model: nn.Module) -> Iterator[None]:
    """Within, BatchNorm layers in training mode normalise with the batch but do not update their running statistics."""
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training and m.track_running_stats]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
