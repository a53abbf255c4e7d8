"""The papers' backbones: three skeletons (conv-stem hierarchy, PVT, Swin) and DeiT, into which any variant plugs.

Importing this package imports no torch; ``register()`` makes the sizes known to timm (``clip_linear.register()`` does).
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "from_official": "clip_linear.backbones.official",
    "load_official": "clip_linear.backbones.official",
    "FAMILIES": "clip_linear.backbones.official",
    "register": "clip_linear.backbones.zoo",
    "SIZES": "clip_linear.backbones.sizes",
}
__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'clip_linear.backbones' has no attribute {name!r}")
