"""Attention arithmetic: one linear-time primitive, its O(N²) truth, and the backends that obey it.

Importing this package does not import torch; the first use does.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "linear_attention": "clip_linear_kernels.api",
    "linear_attention_qkvpacked": "clip_linear_kernels.api",
    "diagonal_attention": "clip_linear_kernels.api",
    "linear_attention_reference": "clip_linear_kernels.reference",
    "available_backends": "clip_linear_kernels.dispatch",
    "set_backend": "clip_linear_kernels.dispatch",
    "FEATURES": "clip_linear_kernels.spec",
    "NORMALISERS": "clip_linear_kernels.spec",
}
__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'clip_linear_kernels' has no attribute {name!r}")
