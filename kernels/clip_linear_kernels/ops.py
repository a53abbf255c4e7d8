"""``linear_attention``: the one primitive under every variant."""

from __future__ import annotations

import torch
from torch import Tensor

from clip_linear_kernels import eager
from clip_linear_kernels.spec import FEATURES, NORMALISERS


def linear_attention(
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
    """o_i = a(d_i, n_i) φ(q_i) Σ_j w_j φ(k_j)ᵀ v_j + b(d_i, n_i) Σ_j w_j v_j in time linear in the number of tokens.

    q [B, H, N, F], k [B, H, M, F], v [B, H, M, E]; M = N when ``causal``. ``q_den``/``k_den`` (default q, k) take the
    place of q and k in d_i = φ(q_den_i)·Σ_j w_j φ(k_den_j) (rotary embeddings rotate the numerator only). ``weights``
    [B, H, M] ≥ 0 and ``key_mask`` [B, M] (True = keep) make w_j; n_i = Σ_j w_j. ``feature`` and ``normaliser`` name
    rows of clip_linear_kernels.spec. ``eps`` is a float or a tensor broadcastable to [B, H, N, 1].

    Sums, normalisers and states are float32 or wider whatever the input; returns [B, H, N, E] in v's dtype.
    Raises ValueError for an unknown feature or normaliser, and for causal attention with M ≠ N.
    """
    if feature not in FEATURES or normaliser not in NORMALISERS:
        raise ValueError(
            f"feature {feature!r} with normaliser {normaliser!r} is not known; "
            f"features: {', '.join(FEATURES)}; normalisers: {', '.join(NORMALISERS)}"
        )
    if causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"causal attention needs as many keys as queries, not {k.shape[-2]} keys and {q.shape[-2]} queries"
        )
    out_dtype = v.dtype
    device = "cpu" if q.device.type == "meta" else q.device.type  # autocast knows no meta device
    with torch.autocast(device, enabled=False):
        phi = FEATURES[feature]
        q, k, v = phi(_wide(q)), phi(_wide(k)), _wide(v)
        qd = q if q_den is None else phi(_wide(q_den))
        kd = k if k_den is None else phi(_wide(k_den))
        w = torch.ones((), dtype=k.dtype, device=k.device).expand(k.shape[0], 1, k.shape[-2])
        if weights is not None:
            w = _wide(weights)
        if key_mask is not None:
            w = w * key_mask[:, None]
        form = eager.causal if causal else eager.full
        return form(q, k, v, w, qd, kd, NORMALISERS[normaliser], scale, eps).to(out_dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
