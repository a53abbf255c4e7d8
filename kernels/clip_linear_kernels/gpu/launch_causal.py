"""Launching the causal kernels of one slice of values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clip_linear_kernels.call import Form, Inputs
from clip_linear_kernels.gpu import causal_backward as bwd
from clip_linear_kernels.gpu import causal_forward as fwd
from clip_linear_kernels.gpu import configs
from clip_linear_kernels.gpu.host import Sizes, codes_of, or_else, run, state_parts, strides, w_strides


def _before(parts: Tensor) -> Tensor:
    # Exclusive prefix sum over segments.
    return torch.nn.functional.pad(parts.cumsum(1)[:, :-1], (0, 0, 1, 0))


def _segments(x: Inputs, form: Form, sizes: Sizes, config: configs.Config) -> tuple[int, Tensor]:
    splits = sizes.splits(sizes.queries, 4 * config.block)
    if splits == 1:
        return 1, x.v
    return splits, _before(state_parts(x, form, sizes, config, splits))


def _causal_pointers(x: Inputs) -> tuple[Tensor, ...]:
    return x.q, x.k, x.v, or_else(x.qd, x.q), or_else(x.kd, x.k), or_else(x.w, x.v)


def _causal_strides(x: Inputs) -> tuple[int, ...]:
    return (*strides(x.q), *strides(x.k), *strides(x.v), *strides(x.qd), *strides(x.kd), *w_strides(x))


def forward(x: Inputs, form: Form, out: Tensor) -> None:
    """Fill out [B, H, N, E]."""
    sizes = Sizes(x)
    config = sizes.need("causal_forward")
    splits, state = _segments(x, form, sizes, config)
    args = (
        *_causal_pointers(x), or_else(x.eps, x.v), state, out, sizes.queries, sizes.heads, splits, form.scale, form.eps,
        *_causal_strides(x), *strides(x.eps), *strides(out),
    )  # fmt: skip
    flags = {"C": config.block, "HAS_W": x.w is not None, "HAS_STATE": splits > 1}
    run(fwd.causal_forward, (splits, sizes.rows), args, config, **flags, **codes_of(x, form), **sizes.constants)


def backward(grad: Tensor, x: Inputs, form: Form, out: Inputs) -> None:
    """Fill the gradients by q, k, v, q_den and k_den."""
    sizes = Sizes(x)
    config = sizes.need("causal_backward_q")
    splits, state = _segments(x, form, sizes, config)
    scalars = torch.empty(4, sizes.rows, sizes.queries, dtype=torch.float32, device=sizes.device)
    codes = codes_of(x, form)
    flags = {"C": config.block, "HAS_W": x.w is not None, "HAS_STATE": splits > 1}
    grid = (splits, sizes.rows)
    args: tuple[Any, ...] = (
        *_causal_pointers(x), or_else(x.eps, x.v), state, grad, out.q, or_else(out.qd, out.q), scalars,
        sizes.queries, sizes.heads, splits, form.scale, form.eps,
        *_causal_strides(x), *strides(x.eps), *strides(grad), *strides(out.q), *strides(out.qd),
    )  # fmt: skip
    run(bwd.causal_backward_q, grid, args, config, **flags, **codes, **sizes.constants)
    codes = {"PHI": codes["PHI"], "HAS_DEN": codes["HAS_DEN"]}
    after = x.v
    if splits > 1:
        parts = torch.empty(sizes.rows, splits, sizes.state, dtype=torch.float32, device=sizes.device)
        config = sizes.need("causal_suffix")
        args = (
            x.q, or_else(x.qd, x.q), grad, scalars, parts, sizes.queries, sizes.heads, splits,
            *strides(x.q), *strides(x.qd), *strides(grad),
        )  # fmt: skip
        run(bwd.causal_suffix, grid, args, config, C=flags["C"], **codes, **sizes.constants)
        after = _before(parts.flip(1)).flip(1)
    config = sizes.need("causal_backward_kv")
    args = (
        *_causal_pointers(x), grad, out.k, out.v, or_else(out.kd, out.k), scalars, after,
        sizes.queries, sizes.heads, splits,
        *_causal_strides(x), *strides(grad), *strides(out.k), *strides(out.v), *strides(out.kd),
    )  # fmt: skip
    for do_k, do_v in configs.kv_passes(sizes.arch, sizes.FP):
        passes = {"DO_K": do_k, "DO_V": do_v}
        run(bwd.causal_backward_kv, grid, args, config, **passes, **flags, **codes, **sizes.constants)
