"""The primitive in plain torch: two matmuls for all tokens, chunks with carried states for causal attention."""

from __future__ import annotations

import torch
from torch import Tensor

from clip_linear_kernels.spec import Normaliser

CHUNK = 128  # tokens; inside a chunk the masked quadratic form is used, between chunks the state is carried


def full(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    qd: Tensor,
    kd: Tensor,
    norm: Normaliser,
    scale: float,
    eps: float | Tensor,
) -> Tensor:
    """Non-causal form. q, qd [B, H, N, F]; k, kd [B, H, M, F], φ applied; v [B, H, M, E]; w [B, H or 1, M]."""
    wk = k * w[..., None]
    y = q @ (wk.mT @ v)  # [B, H, N, E]
    n = _count(w.sum(-1))[..., None, None]
    s = wk if kd is k else kd * w[..., None]
    d = qd @ s.sum(-2)[..., None] if norm.needs_d else torch.zeros_like(q[..., :1])
    a, b = norm.ab(d, n, scale, eps)
    return a * y + b * (v * w[..., None]).sum(-2, keepdim=True) if norm.needs_u else a * y


def causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    qd: Tensor,
    kd: Tensor,
    norm: Normaliser,
    scale: float,
    eps: float | Tensor,
) -> Tensor:
    """Causal form, the same shapes with M = N. Masked quadratic up to N = 2F, chunks of CHUNK tokens above."""
    N, chunk = q.shape[-2], CHUNK
    if max(2 * q.shape[-1], chunk) >= N:
        chunk = N
    pad = -N % chunk

    def chunks(x: Tensor) -> Tensor:  # [B, H, N, F] -> [B, H, N / chunk, chunk, F]; padded tokens have weight 0
        return torch.nn.functional.pad(x, (0, 0, 0, pad)).unflatten(-2, (-1, chunk))

    def before(x: Tensor) -> Tensor:  # exclusive prefix sum over chunks; shifted, so that no later chunk enters it
        return torch.nn.functional.pad(x.cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0))

    same = qd is q and kd is k
    w = chunks(w[..., None])
    q, k, v = chunks(q), chunks(k), chunks(v)
    qd, kd = (q, k) if same else (chunks(qd), chunks(kd))
    if isinstance(eps, Tensor):
        eps = chunks(eps.expand(*eps.shape[:2], N, 1)) if eps.shape[2] != 1 else eps[..., None]
    wk = k * w
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    scores = (q @ wk.mT).masked_fill(~lower, 0)
    y = scores @ v
    if chunk < N:
        y = y + q @ before(wk.mT @ v)
    wv = v * w
    n = _count(before(w.sum(-2, keepdim=True)) + w.cumsum(-2))
    if not norm.needs_d:
        d = torch.zeros_like(q[..., :1])
    else:
        wkd = wk if same else kd * w
        d_scores = scores if same else (qd @ wkd.mT).masked_fill(~lower, 0)
        d = d_scores.sum(-1, keepdim=True)
        if chunk < N:
            d = d + qd @ before(wkd.sum(-2, keepdim=True)).mT
    a, b = norm.ab(d, n, scale, eps)
    o = a * y + b * (before(wv.sum(-2, keepdim=True)) + wv.cumsum(-2)) if norm.needs_u else a * y
    return o.flatten(2, 3)[..., :N, :]


def _count(n: Tensor) -> Tensor:
    # A query that sees no key (left padding) has n = 0: its output is a don't-care that must be finite.
    return torch.where(n > 0, n, torch.ones_like(n))
