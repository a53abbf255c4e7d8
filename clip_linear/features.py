"""What the variants' feature maps share: sums over visible keys, exponentials that cannot overflow, key positions."""

from __future__ import annotations

import torch
from torch import Tensor

from clip_linear.attention import split_heads


def smallest(x: Tensor) -> float:
    """The least number whose reciprocal squared is finite in x's precision: for a denominator that may be 0.

    About 1e-18 in float32 and 1e-145 in float64, so it changes no denominator that is not numerically zero.
    """
    return float(torch.finfo(x.dtype).tiny ** 0.47)


def visible_sum(x: Tensor, causal: bool, key_mask: Tensor | None) -> Tensor:
    """Sum over the tokens that each query may see: x [B, H, M, F] -> [B, H, M, F] causal, else [B, H, 1, F]."""
    if key_mask is not None:
        x = x * key_mask[:, None, :, None]
    return x.cumsum(-2) if causal else x.sum(-2, keepdim=True)


def visible_count(x: Tensor, causal: bool, key_mask: Tensor | None) -> Tensor:
    """How many tokens of x [B, H, M, F] each query may see, at least 1: [B or 1, 1, M, 1] causal, else [.., 1, 1]."""
    return visible_sum(x.new_ones(1, 1, x.shape[-2], 1), causal, key_mask).clamp(min=1)


def cancel_maxima(q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Shift exponents so that exp never overflows and the largest summand of Σ exp(q)·exp(k) is at least 1.

    q [B, H, N, F] and k [B, H, M, F] are exponents. With m_c = max_j k_jc over the kept keys, k_jc − m_c and
    q_ic + m_c − c_i (c_i the row's maximum) leave every ratio as it is: m cancels in products, c in the normaliser.
    Returns (q', k', c [B, H, N, 1]); an ε of the normaliser is to be multiplied by exp(−c).
    """
    hidden = None if key_mask is None else ~key_mask[:, None, :, None]
    seen = k.detach() if hidden is None else k.detach().masked_fill(hidden, float("-inf"))
    # A sample without any kept key has no maximum; its outputs are don't-cares that must be finite.
    m = seen.amax(-2, keepdim=True).nan_to_num(neginf=0.0)
    k = k - m if hidden is None else (k - m).masked_fill(hidden, 0.0)
    c = (q.detach() + m).amax(-1, keepdim=True)
    return q + (m - c), k, c


def add_positions(k: Tensor, table: Tensor | None) -> Tensor:
    """Keys [B, H, M, D] with a positional encoding [1 or B, M, H·D] added."""
    return k if table is None else k + split_heads(table.to(k.dtype), k.shape[1])
