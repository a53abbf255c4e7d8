"""Which backend serves a call, and why. ``CLIP_LINEAR_BACKEND`` or ``set_backend`` override the choice."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from typing import Any

import torch

from clip_linear_kernels import lean
from clip_linear_kernels.call import Backend, Form, Inputs
from clip_linear_kernels.cpu import launch
from clip_linear_kernels.cpu.build import kernel

logger = logging.getLogger(__name__)

BACKENDS = {
    "triton": "fused kernels for CUDA and ROCm devices",
    "cpp": "a C++ kernel for CPUs, compiled at first use",
    "eager": "torch operators, forward and backward written out; any device and dtype",
    "compile": "torch.compile of the plain form",
    "reference": "the N×M weight matrix written out, in float64: slow, for comparison",
}
_forced: str | None = None


def set_backend(name: str | None) -> None:
    """Serve every following call of this process with one backend; None gives the choice back to the package.

    A call that the backend cannot serve goes to "eager", with one warning a reason. Raises ValueError for a name that
    is not in BACKENDS.
    """
    global _forced
    if name is not None and name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; known: {', '.join(BACKENDS)}; unset CLIP_LINEAR_BACKEND for auto")
    _forced = name


def forced() -> str | None:
    """The backend that the user asked for, if any."""
    return _forced


def backend(x: Inputs, form: Form) -> Backend:
    """The module that serves a call."""
    return choose(x, form)[1]


def choose(x: Inputs, form: Form) -> tuple[str, Any, str]:
    """(backend, its module, why) for a call."""
    device = x.v.device.type
    if _forced == "eager":
        return "eager", lean, "asked for"
    if device == "cpu" and _forced in (None, "cpp") and torch._C._len_torch_dispatch_stack() == 0:
        reason = launch.unsupported(x, form)
        if reason is None:
            build = kernel()
            if build.library is not None:
                return "cpp", launch, build.isa
            reason = build.state
        return "eager", lean, reason
    if torch._C._len_torch_dispatch_stack() > 0:
        return "eager", lean, "a dispatch mode (FLOP counter, fake tensors) wants to see torch operators"
    if device == "cuda" or _forced == "triton":
        module, reason = _triton(device)
        reason = reason if module is None else module.unsupported(x, form)
        if reason is None:
            return "triton", module, "asked for" if _forced else "a CUDA or ROCm device"
        return "eager", lean, _say("triton", reason)
    return "eager", lean, f"no kernel for {device}"


def whole_form() -> str | None:
    """ "reference" or "compile" when the user asked for a form that brings its own gradients, else None."""
    return _forced if _forced in ("reference", "compile") else None


def traced_as_operator(device: str, dtype: torch.dtype, feature: str, widest: int) -> bool:
    """Whether ``torch.compile`` should see the opaque operator instead of the plain form, which Inductor fuses.

    The operator wins where a kernel stands behind it: a compiled plain form takes about twice its time on CPU.
    """
    if device == "cuda" and _forced in (None, "triton"):
        return dtype in (torch.float32, torch.bfloat16, torch.float16) and _triton(device)[0] is not None
    if device == "cpu" and _forced in (None, "cpp"):
        return launch.serves(dtype, feature, widest) is None and kernel().library is not None
    return False


def available_backends() -> dict[str, str]:
    """Backend -> "ready" (C++: its instruction set and build), or why it cannot be used here and what to do."""
    found = dict.fromkeys(BACKENDS, "ready")
    found["triton"] = _triton("cuda" if torch.cuda.is_available() else "cpu")[1] or "ready"
    build = kernel()
    found["cpp"] = f"{build.isa}; {build.state}" if build.library is not None else build.state
    return found


@functools.cache
def _triton(device: str) -> tuple[Any, str | None]:
    if importlib.util.find_spec("triton") is None:
        return None, "Triton is not installed: pip install triton"
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return None, "no CUDA or ROCm device"
    from clip_linear_kernels.gpu import launch as gpu

    return gpu, None


@functools.cache
def _say(asked: str, reason: str) -> str:
    # Once a reason: a model makes thousands of such calls.
    logger.warning("clip_linear: the %s backend does not serve such a call (%s); torch operators do", asked, reason)
    return reason


# What torch.compiler.assume_constant_result does, without its import of torch._dynamo (155 MB, seconds).
traced_as_operator._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _from_environment(name: str | None) -> None:
    # A wrong value is said and left aside: an error while importing would be a traceback in every command.
    try:
        set_backend(name or None)
    except ValueError as error:
        logger.warning("clip_linear: CLIP_LINEAR_BACKEND is ignored: %s", error)


_from_environment(os.environ.get("CLIP_LINEAR_BACKEND"))
