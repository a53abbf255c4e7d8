"""The C++ backend: which calls it serves, and how a call is packed for it."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from clip_linear_kernels.call import Form, Inputs, token_major
from clip_linear_kernels.cpu.build import kernel
from clip_linear_kernels.spec import FEATURES, NORMALISERS

_FEATURES = {name: f.code for name, f in FEATURES.items() if name != "focused3"}
_NORMALISERS = {name: n.code for name, n in NORMALISERS.items()}
_HALF = {torch.float32: 0, torch.bfloat16: 1}
_NONE = (0, 0, 0, 0)
_PROBLEM = struct.Struct("66q2d")  # struct Problem of problem.h
# The best instruction set there is; tests ask for others (1 portable, 2 AVX2, 3 AVX-512).
isa = 0


def serves(dtype: torch.dtype, feature: str, widest: int) -> str | None:
    """Why the kernel cannot serve such calls, or None; ``widest``: channels a head of q or v."""
    if dtype not in _HALF:
        return f"{dtype} has no kernel"
    if feature not in _FEATURES:
        return f"feature {feature} has no kernel"
    return "more than 128 channels a head" if widest > 128 else None


def unsupported(x: Inputs, form: Form) -> str | None:
    """Why this kernel cannot serve a call, or None."""
    dtype = x.v.dtype
    if x.q.dtype is not dtype or x.k.dtype is not dtype:
        return "q, k and v differ in dtype"
    if x.qd is not None and x.kd is not None and (x.qd.dtype is not dtype or x.kd.dtype is not dtype):
        return "q_den and k_den differ in dtype"
    if x.q.numel() == 0 or x.v.numel() == 0 or x.k.numel() == 0:
        return "empty"
    return serves(dtype, form.feature, max(x.q.shape[3], x.v.shape[3]))


def keeps(x: Inputs, form: Form) -> tuple[int, ...]:
    """Nothing: states are computed again, from memory that the backward pass reads anyway."""
    return (0,)


def forward(x: Inputs, form: Form) -> tuple[Tensor, None]:
    """Output [B, H, N, E] in v's dtype, token-major; no state."""
    out = token_major(x.v, x.v.shape[3], x.q.shape[2])
    _call(x, form, out, None, None)
    return out, None


def backward(grad: Tensor, x: Inputs, state: Tensor | None, form: Form, out: Inputs) -> None:
    """Fill the gradients ``out``."""
    dw = None
    if out.w is not None:
        dw = torch.empty(*x.k.shape[:3], dtype=torch.float32)
    _call(x, form, grad, out, dw)
    if out.w is not None and dw is not None:
        out.w += dw.sum_to_size(out.w.shape)


def _rows(t: Tensor) -> tuple[int, int, int, int]:
    batch, head, token, _ = t.stride()
    return t.data_ptr(), batch, head, token


def _unit(t: Tensor) -> Tensor:
    return t if t.stride(3) == 1 or t.shape[3] == 1 else t.contiguous()


def _call(x: Inputs, form: Form, out: Tensor, grads: Inputs | None, dw: Tensor | None) -> None:
    q, k, v = _unit(x.q), _unit(x.k), _unit(x.v)
    out = _unit(out)
    batch, heads, queries, features = q.shape
    _, _, keys, values = v.shape
    packed = [
        grads is not None, isa, torch.get_num_threads(), batch, heads, queries, keys, features, values,
        _FEATURES[form.feature], _NORMALISERS[form.normaliser], form.causal, _HALF[v.dtype],
        *_rows(q), *_rows(k), *_rows(v),
    ]  # fmt: skip
    alive: list[Tensor] = [q, k, v, out]  # copies live until the call is over
    if x.qd is None or x.kd is None:
        packed += (*_NONE, *_NONE, *_rows(out))
    else:
        qd, kd = _unit(x.qd), _unit(x.kd)
        alive += (qd, kd)
        packed += (*_rows(qd), *_rows(kd), *_rows(out))
    if grads is None:
        packed += _NONE * 5
    else:
        for t in (grads.q, grads.k, grads.v, grads.qd, grads.kd):
            packed += _NONE if t is None else _rows(t)
    if x.w is None:
        packed += (0, 0, 0)
    else:
        w = x.w.float().contiguous()
        alive.append(w)
        packed += (w.data_ptr(), 0 if w.shape[0] == 1 else w.stride(0), 0 if w.shape[1] == 1 else w.stride(1))
    if x.eps is None:
        packed += _NONE
    else:
        eps = x.eps.float().expand(batch, heads, queries, 1)
        alive.append(eps)
        packed += _rows(eps)
    packed += (0 if dw is None else dw.data_ptr(), 0)
    library = kernel().library
    assert library is not None
    if library.clip_linear_attention(_PROBLEM.pack(*packed, form.scale, form.eps)):
        raise MemoryError("no memory for the states of linear attention")
