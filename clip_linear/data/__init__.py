"""Image–text shards: read, checked, written, streamed into training. Nothing imports torch before it is used."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "Batch": "clip_linear.data.loader",
    "DataConfig": "clip_linear.data.config",
    "Fault": "clip_linear.data.faults",
    "Sample": "clip_linear.data.samples",
    "TrainLoader": "clip_linear.data.loader",
    "count_samples": "clip_linear.data.shards",
    "ShardWriter": "clip_linear.data.write",
    "expand": "clip_linear.data.shards",
    "merge_states": "clip_linear.data.state",
    "read_groups": "clip_linear.data.reader",
    "read_samples": "clip_linear.data.reader",
    "train_loader": "clip_linear.data.loader",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'clip_linear.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
