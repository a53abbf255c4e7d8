"""The primitive without a tape: forward and backward written out, batch by batch, so that little is alive at once.

Only the inputs are kept for the backward pass; states are computed again. Notation of ``spec``; g_i = ∂L/∂o_i and

    δ_i = a'_i (g_i·y_i) + b'_i (g_i·u)        ∂S = Σ φ(q_i)ᵀ a_i g_i     ∂s = Σ δ_i φ(q_i)     ∂u = Σ b_i g_i
    ∂φ(q_i) = a_i g_i Sᵀ + δ_i s     ∂φ(k_j) = w_j (∂S v_j + ∂s)     ∂v_j = w_j (φ(k_j) ∂S + ∂u)

with prefix (suffix) sums in place of the sums when causal. Checked against ``reference`` in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clip_linear_kernels import lean_causal
from clip_linear_kernels.call import Form, Inputs, token_major
from clip_linear_kernels.plain import count, no_autocast, wide
from clip_linear_kernels.spec import FEATURES, NORMALISERS


def keeps(x: Inputs, form: Form) -> tuple[int, ...]:
    """Nothing: states are computed again."""
    return (0,)


def forward(x: Inputs, form: Form) -> tuple[Tensor, None]:
    """The primitive's output, [B, H, N, E] in v's dtype; no state."""
    out = token_major(x.v, x.v.shape[-1], x.q.shape[-2])
    step = lean_causal.forward if form.causal else _forward
    with no_autocast(out):
        for rows, heads in x.blocks():
            out[rows, heads] = step(x.at(rows, heads), form)
    return out, None


def backward(grad: Tensor, x: Inputs, state: Tensor | None, form: Form, out: Inputs) -> None:
    """Fill the gradients ``out`` (empty; w: zeros); None there for what is absent or not needed."""
    step = lean_causal.backward if form.causal else _backward
    with no_autocast(grad):
        for rows, heads in x.blocks():
            *parts, dw = step(wide(grad[rows, heads]), x.at(rows, heads), form, out.w is not None)
            for whole, part in zip((out.q, out.k, out.v, out.qd, out.kd), parts):
                if whole is not None and part is not None:
                    whole[rows, heads] = part
            if out.w is not None and dw is not None:
                if out.w.shape[1] == 1:
                    out.w[rows] += dw.sum(1, keepdim=True)
                else:
                    out.w[rows, heads] = dw


def _forward(x: Inputs, form: Form) -> Tensor:
    phi, norm = FEATURES[form.feature], NORMALISERS[form.normaliser]
    kf = phi(x.k)
    wk = kf if x.w is None else kf * x.w[..., None]
    n = _n(x)
    y = phi(x.q) @ (wk.mT @ x.v)
    if norm.needs_d:
        wkd = wk if x.kd is None else phi(x.kd) if x.w is None else phi(x.kd) * x.w[..., None]
        d = phi(x.q if x.qd is None else x.qd) @ wkd.sum(-2)[..., None]
    else:
        d = torch.zeros_like(y[..., :1])
    a, b = norm.ab(d, n, form.scale, form.eps if x.eps is None else x.eps)
    y *= a
    return y.addcmul_(b, _u(x)) if norm.needs_u else y


def _backward(g: Tensor, x: Inputs, form: Form, needs_w: bool) -> list[Tensor | None]:
    phi, norm = FEATURES[form.feature], NORMALISERS[form.normaliser]
    eps = form.eps if x.eps is None else x.eps
    qf, kf, n = phi(x.q), phi(x.k), _n(x)
    qdf = qf if x.qd is None else phi(x.qd)
    kdf = kf if x.kd is None else phi(x.kd)
    w = None if x.w is None else x.w[..., None]
    S = (kf if w is None else kf * w).mT @ x.v
    s = (kdf if w is None else kdf * w).sum(-2, keepdim=True)  # [B, H, 1, F]
    u = _u(x)
    d = qdf @ s.mT
    a, b = norm.ab(d, n, form.scale, eps)
    a_d, b_d = norm.by_d(d, n, form.scale, eps)
    dq = g @ S.mT
    da = (dq * qf).sum(-1, keepdim=True)
    db = g @ u.mT
    delta = a_d * da + b_d * db
    dq *= a
    dS = qf.mT @ (a * g)
    ds = delta.mT @ qdf  # [B, H, 1, F]
    du = b.expand_as(delta).mT @ g
    dqd = dkd = dw = None
    if x.qd is None:
        dq.addcmul_(delta, s)
    else:
        dqd = FEATURES[form.feature].vjp(x.qd, qdf, delta * s)
    dk = x.v @ dS.mT
    if needs_w and w is not None:
        a_n, b_n = norm.by_n(d, n, form.scale, eps)
        dn = ((a_n * da + b_n * db) * (w.sum(-2, keepdim=True) > 0)).sum(-2)
        dw = (dk * kf).sum(-1) + (x.v @ du.mT + kdf @ ds.mT)[..., 0] + dn
    if x.kd is None:
        dk += ds
    else:
        dkd = FEATURES[form.feature].vjp(x.kd, kdf, ds.expand_as(kdf) if w is None else ds * w)
    dv = kf @ dS
    dv += du
    if w is not None:
        dk *= w
        dv *= w
    return [FEATURES[form.feature].vjp(x.q, qf, dq), FEATURES[form.feature].vjp(x.k, kf, dk), dv, dqd, dkd, dw]


def _n(x: Inputs) -> Tensor:
    if x.w is None:
        return x.v.new_full((1, 1, 1, 1), x.k.shape[-2])
    return count(x.w.sum(-1))[..., None, None]


def _u(x: Inputs) -> Tensor:
    return x.v.sum(-2, keepdim=True) if x.w is None else x.w[..., None, :] @ x.v
