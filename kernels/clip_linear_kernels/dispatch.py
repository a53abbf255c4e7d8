"""Which backend serves a call, and why. ``CLIP_LINEAR_BACKEND`` or ``set_backend`` override the choice."""

from __future__ import annotations

import logging
import os

import torch

from clip_linear_kernels import lean
from clip_linear_kernels.call import Backend, Form, Inputs

logger = logging.getLogger(__name__)

BACKENDS = {
    "reference": "the N×M matrix written out, in float64: slow, for comparison",
    "eager": "torch operators, forward and backward written out; any device and dtype",
    "compile": "torch.compile of the plain form",
}
_forced: str | None = None
_warned: set[str] = set()


def set_backend(name: str | None) -> None:
    """Serve every following call of this process with one backend; None gives the choice back to the package.

    Raises ValueError for a name that is not in BACKENDS.
    """
    global _forced
    if name is not None and name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; known: {', '.join(BACKENDS)}; unset CLIP_LINEAR_BACKEND for auto")
    _forced = name


def forced() -> str | None:
    """The backend that the user asked for, if any."""
    return _forced


def choose(x: Inputs, form: Form) -> tuple[str, str]:
    """(backend, reason) for a call."""
    if _forced is not None:
        return _forced, "asked for"
    return "eager", "the default"


def backend(x: Inputs, form: Form) -> Backend:
    """The module that serves a call."""
    return lean


def whole_form() -> str | None:
    """ "reference" or "compile" when the user asked for a form that brings its own gradients, else None."""
    return _forced if _forced in ("reference", "compile") else None


def traced_as_operator(device: str, dtype: torch.dtype) -> bool:
    """Whether ``torch.compile`` should see the opaque operator instead of the plain form."""
    return device == "cuda"


# What torch.compiler.assume_constant_result does, without its import of torch._dynamo (155 MB, seconds).
traced_as_operator._dynamo_marked_constant = True  # type: ignore[attr-defined]


set_backend(os.environ.get("CLIP_LINEAR_BACKEND") or None)
