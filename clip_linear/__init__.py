"""clip_linear: any linear attention in any OpenCLIP model, trained, evaluated and fitted beside softmax.

Everything below is loaded on first use; importing this package imports neither torch nor open_clip.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "register": "clip_linear.openclip",
    "list_variants": "clip_linear.registry",
    "variant_info": "clip_linear.registry",
    "create_model": "clip_linear.factory",
    "create_model_and_transforms": "clip_linear.factory",
    "swap_attention": "clip_linear.towers",
}
_MODULES = ("backbones", "convert", "data", "emoji", "functional")
__all__ = [*_EXPORTS, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"clip_linear.{name}")
    raise AttributeError(f"module 'clip_linear' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
