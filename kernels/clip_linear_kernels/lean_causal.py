"""The causal form of ``lean``: chunks of tokens, the masked quadratic form inside, states carried between.

Backward, inside a chunk: G_ij = g_i·v_j and h_i = Σ_{j≤i} G_ij φ(k_j) + g_i Sᵀ with S the state before the chunk, so
that g_i·y_i = h_i·φ(q_i) and ∂φ(q_i) = a_i h_i + δ_i s_i need no second output pass. With ĝ = a g and R = Σ φ(q_i)ᵀ ĝ_i
over LATER chunks, ∂φ(k_j) = w_j (Σ_{i≥j} ĝ_i·v_j φ(q_i) + R v_j + Σ_{i≥j} δ_i φ(q_i)) and so on.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from clip_linear_kernels.call import Form, Inputs
from clip_linear_kernels.plain import count
from clip_linear_kernels.plain import forward as plain_forward
from clip_linear_kernels.spec import FEATURES, NORMALISERS

CHUNK = 64


def forward(x: Inputs, form: Form) -> Tensor:
    """[B, H, N, E] of one block."""
    eps = form.eps if x.eps is None else x.eps
    return plain_forward(x.q, x.k, x.v, x.qd, x.kd, x.w, eps, form.feature, form.normaliser, True, form.scale)


def backward(g: Tensor, x: Inputs, form: Form, needs_w: bool) -> list[Tensor | None]:
    """Gradients by q, k, v, qd, kd, w of one block."""
    feature, norm = FEATURES[form.feature], NORMALISERS[form.normaliser]
    eps = form.eps if x.eps is None else x.eps
    N = x.q.shape[-2]
    chunk = min(N, CHUNK)
    w = None if x.w is None else x.w[..., None]
    n = torch.arange(1, N + 1, dtype=g.dtype, device=g.device)[:, None] if w is None else count(w.cumsum(-2))
    phi_q, phi_k = feature(x.q), feature(x.k)
    q, v, G = (_chunks(t, chunk) for t in (phi_q, x.v, g))
    wk = _chunks(phi_k if w is None else phi_k * w, chunk)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).tril()
    h = _tokens((G @ v.mT).masked_fill_(~lower, 0) @ wk + G @ _before(wk.mT @ v).mT, N)
    da = (h * phi_q).sum(-1, keepdim=True)
    u = (x.v if w is None else x.v * w).cumsum(-2)
    db = (g * u).sum(-1, keepdim=True)
    del u
    phi_qd = phi_q if x.qd is None else feature(x.qd)
    phi_kd = phi_k if x.kd is None else feature(x.kd)
    s = (phi_kd if w is None else phi_kd * w).cumsum(-2)
    d = (phi_qd * s).sum(-1, keepdim=True)
    a, b = norm.ab(d, n, form.scale, eps)
    a_d, b_d = norm.by_d(d, n, form.scale, eps)
    delta = a_d * da + b_d * db
    dqd = dkd = dw = None
    h *= a
    if x.qd is None:
        h.addcmul_(delta, s)
    else:
        dqd = feature.vjp(x.qd, phi_qd, s.mul_(delta))
    dq = feature.vjp(x.q, phi_q, h)
    del s, h
    G = _chunks(a * g, chunk)
    R = _after(q.mT @ G)
    dk = _tokens((v @ G.mT).masked_fill_(~lower.mT, 0) @ q + v @ R.mT, N)
    dv = _tokens((wk @ q.mT).masked_fill_(~lower.mT, 0) @ G + wk @ R, N)  # w is already in wk
    r, p = _suffix(delta * phi_qd), _suffix(b * g)
    if needs_w and w is not None:
        a_n, b_n = norm.by_n(d, n, form.scale, eps)
        dn = _suffix((a_n * da + b_n * db) * (w.cumsum(-2) > 0))
        dw = (dn + (dk * phi_k + phi_kd * r).sum(-1, keepdim=True) + (x.v * p).sum(-1, keepdim=True))[..., 0]
    if x.kd is None:
        dk += r
    else:
        dkd = feature.vjp(x.kd, phi_kd, r if w is None else r * w)
    if w is not None:
        dk *= w
        p *= w
    dv += p
    return [dq, feature.vjp(x.k, phi_k, dk), dv, dqd, dkd, dw]


def _chunks(x: Tensor, chunk: int) -> Tensor:
    # [B, H, N, F] -> [B, H, N / chunk, chunk, F]; zeros behind the end.
    return F.pad(x, (0, 0, 0, -x.shape[-2] % chunk)).unflatten(-2, (-1, chunk))


def _tokens(x: Tensor, length: int) -> Tensor:
    return x.flatten(2, 3)[..., :length, :]


def _before(x: Tensor) -> Tensor:
    # Exclusive prefix sum over chunks; shifted, so that no later chunk enters it.
    return F.pad(x.cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0))


def _after(x: Tensor) -> Tensor:
    # Exclusive suffix sum over chunks.
    return F.pad(x.flip(2).cumsum(2).flip(2)[:, :, 1:], (0, 0, 0, 0, 0, 1))


def _suffix(x: Tensor) -> Tensor:
    # Inclusive suffix sum over tokens.
    return x.flip(-2).cumsum(-2).flip(-2)
