"""The primitive in differentiable torch: two matmuls for all tokens, chunks with carried states for causal attention.

This form is what ``torch.compile`` traces (Inductor fuses what an opaque operator would hide). Eager calls take
``lean`` or a kernel, which need less memory.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from clip_linear_kernels.spec import FEATURES, NORMALISERS

CHUNK = 128  # tokens; inside a chunk the masked quadratic form is used, between chunks the state is carried


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qd: Tensor | None,
    kd: Tensor | None,
    w: Tensor | None,
    eps: float | Tensor,
    feature: str,
    normaliser: str,
    causal: bool,
    scale: float,
) -> Tensor:
    """The primitive on checked arguments; w [B, H|1, M] or None. Returns [B, H, N, E] in v's dtype."""
    phi, norm, dtype = FEATURES[feature], NORMALISERS[normaliser], v.dtype
    q, k, v = phi(wide(q)), phi(wide(k)), wide(v)
    qd = None if qd is None else phi(wide(qd))
    kd = None if kd is None else phi(wide(kd))
    w = None if w is None else w.to(v.dtype)[..., None]
    eps = eps.to(v.dtype) if isinstance(eps, Tensor) else eps
    y, d, u, n = (_causal if causal else _full)(q, k, v, qd, kd, w, norm.needs_d, norm.needs_u)
    if d is None:
        d = torch.zeros_like(y[..., :1])
    a, b = norm.ab(d, n, scale, eps)
    return (a * y if u is None else a * y + b * u).to(dtype)


def wide(x: Tensor) -> Tensor:
    """float32 at least."""
    return x if x.dtype == torch.float64 else x.float()


def no_autocast(x: Tensor) -> torch.autocast:
    """Context in which the arithmetic keeps its dtype."""
    return torch.autocast("cpu" if x.device.type == "meta" else x.device.type, enabled=False)  # meta has no autocast


def count(n: Tensor) -> Tensor:
    """n, or 1 where a query sees no key (left padding): its output is a don't-care that must be finite."""
    return torch.where(n > 0, n, torch.ones_like(n))


_Parts = tuple[Tensor, Tensor | None, Tensor | None, Tensor]  # y [B, H, N, E]; d [.., N, 1]; u [.., N|1, E]; n


def _full(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qd: Tensor | None,
    kd: Tensor | None,
    w: Tensor | None,
    needs_d: bool,
    needs_u: bool,
) -> _Parts:
    n = v.new_full((1, 1, 1, 1), k.shape[-2]) if w is None else count(w.sum(-2, keepdim=True))
    wk = k if w is None else k * w
    y = q @ (wk.mT @ v)
    d = u = None
    if needs_d:
        wkd = wk if kd is None else kd if w is None else kd * w
        d = (q if qd is None else qd) @ wkd.sum(-2)[..., None]
    if needs_u:
        u = (v if w is None else v * w).sum(-2, keepdim=True)
    return y, d, u, n


def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qd: Tensor | None,
    kd: Tensor | None,
    w: Tensor | None,
    needs_d: bool,
    needs_u: bool,
) -> _Parts:
    N = q.shape[-2]
    chunk = N if max(2 * q.shape[-1], CHUNK) >= N else CHUNK
    pad = -N % chunk

    def chunks(x: Tensor) -> Tensor:  # [B, H, N, F] -> [B, H, N / chunk, chunk, F]; zeros behind the end
        return F.pad(x, (0, 0, 0, pad)).unflatten(-2, (-1, chunk))

    def tokens(x: Tensor) -> Tensor:
        return x.flatten(2, 3)[..., :N, :]

    def before(x: Tensor) -> Tensor:  # exclusive prefix sum over chunks; shifted, so that no later chunk enters it
        return F.pad(x.cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0))

    def up_to(x: Tensor) -> Tensor:  # inclusive prefix sum over tokens
        return tokens(before(x.sum(-2, keepdim=True)) + x.cumsum(-2))

    wk = chunks(k if w is None else k * w)
    q, v = chunks(q), chunks(v)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    scores = (q @ wk.mT).masked_fill(~lower, 0)
    y = scores @ v
    if chunk < N:
        y = y + q @ before(wk.mT @ v)
    y = tokens(y)
    if w is None:
        n = torch.arange(1, N + 1, dtype=v.dtype, device=v.device)[:, None]
    else:
        n = count(w.cumsum(-2))
    d = u = None
    if needs_d:
        if qd is not None or kd is not None:
            q = q if qd is None else chunks(qd)
            wk = wk if kd is None else chunks(kd if w is None else kd * w)
            scores = (q @ wk.mT).masked_fill(~lower, 0)
        d = scores.sum(-1, keepdim=True)
        if chunk < N:
            d = d + q @ before(wk.sum(-2, keepdim=True)).mT
        d = tokens(d)
    if needs_u:
        u = up_to(v if w is None else v * chunks(w))
    return y, d, u, n
