"""The truth: the primitive with its N×M weight matrix written out, in float64. Slow, short, differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from clip_linear_kernels.spec import FEATURES, NORMALISERS


def linear_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature: str = "identity",
    normaliser: str = "mean",
    q_den: Tensor | None = None,
    k_den: Tensor | None = None,
    weights: Tensor | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float = 1.0,
    eps: float | Tensor = 1e-6,
) -> Tensor:
    """The arguments of ``linear_attention``, which says what they mean; O(N·M) time and memory, float64 inside.

    P_ij = w_j (a_i φ(q_i)·φ(k_j) + b_i) over the keys that i may see, o = P v. Returns [B, H, N, E] in v's dtype.
    """
    phi = FEATURES[feature]
    qf, kf = phi(q.double()), phi(k.double())
    qd = qf if q_den is None else phi(q_den.double())
    kd = kf if k_den is None else phi(k_den.double())
    w = torch.ones(k.shape[0], 1, k.shape[-2], dtype=torch.float64, device=k.device)
    if weights is not None:
        w = w * weights.double()
    if key_mask is not None:
        w = w * key_mask[:, None]
    w = w[:, :, None, :].expand(-1, -1, q.shape[-2], -1)  # [B, H|1, N, M]
    if causal:
        w = w.tril()
    n = w.sum(-1, keepdim=True)
    n = torch.where(n > 0, n, torch.ones_like(n))
    d = (w * (qd @ kd.mT)).sum(-1, keepdim=True)
    if isinstance(eps, Tensor):
        eps = eps.double()
    a, b = NORMALISERS[normaliser].ab(d, n, scale, eps)
    return (w * (a * (qf @ kf.mT) + b) @ v.double()).to(v.dtype)


def diagonal_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """The arguments of ``diagonal_attention``; O(N·M) time, float64 inside."""
    w = torch.ones(k.shape[0], 1, q.shape[-2], k.shape[-2], dtype=torch.float64, device=k.device)
    if key_mask is not None:
        w = w * key_mask[:, None, None]
    if causal:
        w = w.tril()
    return (q.double() * (w @ (k.double() * v.double()))).to(v.dtype)
