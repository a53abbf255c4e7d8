"""The Triton backend: which calls it serves, and the order of its kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clip_linear_kernels import lean
from clip_linear_kernels.call import Form, Inputs, empty_gradients, token_major
from clip_linear_kernels.gpu import backward as bwd
from clip_linear_kernels.gpu import configs, launch_causal
from clip_linear_kernels.gpu import forward as fwd
from clip_linear_kernels.gpu.host import Sizes, codes_of, or_else, rows_of, run, state_parts, strides, unit, w_strides


def unsupported(x: Inputs, form: Form) -> str | None:
    """Why these kernels cannot serve a call, or None."""
    if x.v.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{x.v.dtype} has no kernel"
    if any(t is not None and t.dtype != x.v.dtype for t in (x.q, x.k, x.qd, x.kd)):
        return "q, k and v differ in dtype"
    if max(x.q.shape[-1], x.v.shape[-1]) > 128:
        return "more than 128 channels a head"
    if min(x.q.numel(), x.k.numel(), x.v.numel()) == 0:
        return "empty"
    return None


def keeps(x: Inputs, form: Form) -> tuple[int, ...]:
    """One state per head for the backward pass; causal states are computed again."""
    return (0,) if form.causal else (x.q.shape[0] * x.q.shape[1], Sizes(x).state)


def forward(x: Inputs, form: Form) -> tuple[Tensor, Tensor | None]:
    """Output [B, H, N, E] in v's dtype, token-major, and the kept state."""
    x = rows_of(x)
    out = token_major(x.v, x.v.shape[-1], x.q.shape[-2])
    with torch.cuda.device_of(x.v):
        if not form.causal:
            return out, _forward(x, form, out)
        for values in _value_slices(x, form):
            launch_causal.forward(replace(x, v=x.v[..., values]), form, out[..., values])
    return out, None


def backward(grad: Tensor, x: Inputs, state: Tensor | None, form: Form, out: Inputs) -> None:
    """Fill the gradients ``out``."""
    if (form.causal and out.w is not None) or (not form.causal and Sizes(x).config("backward_q") is None):
        # Only the weights of a causal form (RALA's text tower), and wide heads before Hopper, have no kernel.
        lean.backward(grad, x, state, form, out)
        return
    grad, x = unit(grad), rows_of(x)
    with torch.cuda.device_of(x.v):
        if not form.causal:
            assert state is not None
            _backward(grad, x, state, form, out)
            return
        for i, values in enumerate(_value_slices(x, form)):
            part = replace(out, v=out.v[..., values])
            if i:
                part = replace(empty_gradients(x, False), v=part.v)
            launch_causal.backward(grad[..., values], replace(x, v=x.v[..., values]), form, part)
            for whole, more in zip((out.q, out.k, out.qd, out.kd), (part.q, part.k, part.qd, part.kd)):
                if i and whole is not None and more is not None:
                    whole += more


def _value_slices(x: Inputs, form: Form) -> list[slice]:
    sizes = Sizes(x)
    step = configs.value_slice(sizes.arch, sizes.FP, form.causal, x.qd is not None)
    return [slice(start, start + step) for start in range(0, sizes.values, step)]


def _forward(x: Inputs, form: Form, out: Tensor) -> Tensor:
    sizes, codes = Sizes(x), codes_of(x, form)
    fused = max(sizes.queries, sizes.keys) <= configs.FUSED_LENGTH and sizes.rows >= configs.FUSED_ROWS
    args: tuple[Any, ...]
    if fused:
        config = sizes.need("fused_forward")
        state = torch.empty(sizes.rows, sizes.state, dtype=torch.float32, device=sizes.device)
        args = (
            x.q, x.k, x.v, or_else(x.qd, x.q), or_else(x.kd, x.k), or_else(x.w, x.v), or_else(x.eps, x.v),
            state, out,
            sizes.queries, sizes.keys, sizes.heads, form.scale, form.eps,
            *strides(x.q), *strides(x.k), *strides(x.v), *strides(x.qd), *strides(x.kd), *w_strides(x),
            *strides(x.eps), *strides(out),
        )  # fmt: skip
        flags = {"HAS_W": x.w is not None, "KEEP": True}
        run(fwd.fused_forward, (sizes.rows,), args, config, BN=config.block, **codes, **flags, **sizes.constants)
        return state
    config = sizes.need("state_forward")
    parts = state_parts(x, form, sizes, config, sizes.splits(sizes.keys, config.block))
    state = parts[:, 0] if parts.shape[1] == 1 else parts.sum(1)
    config = sizes.need("apply_forward")
    args = (
        x.q, or_else(x.qd, x.q), or_else(x.eps, x.v), state, out, sizes.queries, sizes.heads, form.scale, form.eps,
        *strides(x.q), *strides(x.qd), *strides(x.eps), *strides(out),
    )  # fmt: skip
    grid = (-(-sizes.queries // config.block), sizes.rows)
    run(fwd.apply_forward, grid, args, config, BN=config.block, **codes, **sizes.constants)
    return state


def _backward(grad: Tensor, x: Inputs, state: Tensor, form: Form, out: Inputs) -> None:
    sizes = Sizes(x)
    config = sizes.need("backward_q")
    splits = sizes.splits(sizes.queries, config.block)
    parts = torch.empty(sizes.rows, splits, sizes.gradient, dtype=torch.float32, device=sizes.device)
    args: tuple[Any, ...] = (
        x.q, or_else(x.qd, x.q), or_else(x.eps, x.v), state, grad, out.q, or_else(out.qd, out.q), parts,
        sizes.queries, sizes.heads, splits, form.scale, form.eps,
        *strides(x.q), *strides(x.qd), *strides(x.eps), *strides(grad), *strides(out.q), *strides(out.qd),
    )  # fmt: skip
    codes = codes_of(x, form)
    run(bwd.backward_q, (splits, sizes.rows), args, config, BN=config.block, **codes, **sizes.constants)
    gradient = parts[:, 0] if splits == 1 else parts.sum(1)
    config = sizes.need("backward_kv")
    needs_w = out.w is not None
    dw = torch.empty(sizes.rows if needs_w else 0, sizes.keys, dtype=torch.float32, device=sizes.device)
    args = (
        x.k, x.v, or_else(x.kd, x.k), or_else(x.w, x.v), state, gradient, out.k, out.v, or_else(out.kd, out.k), dw,
        sizes.keys, sizes.heads,
        *strides(x.k), *strides(x.v), *strides(x.kd), *w_strides(x), *strides(out.k), *strides(out.v), *strides(out.kd),
    )  # fmt: skip
    flags = {"HAS_W": x.w is not None, "HAS_DEN": x.kd is not None, "NEEDS_DW": needs_w}
    grid = (-(-sizes.keys // config.block), sizes.rows)
    run(
        bwd.backward_kv, grid, args, config, BN=config.block, PHI=codes["PHI"], **flags, **sizes.constants
    )  # fmt: skip
    if out.w is not None:
        out.w += dw.view(sizes.batch, sizes.heads, sizes.keys).sum_to_size(out.w.shape)
