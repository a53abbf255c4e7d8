"""The tables that every backend is generated from: feature maps φ and normalisers (a, b).

Notation, per head: S = Σ_j w_j φ(k_j)ᵀ v_j  [F, E], s = Σ_j w_j φ(k_j)  [F], u = Σ_j w_j v_j  [E], n = Σ_j w_j, sums
over the keys that query i may see; y_i = φ(q_i) S and d_i = φ(q_i)·s. Every variant is

    o_i = a(d_i, n_i) y_i + b(d_i, n_i) u.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# The reason for 1e-12 under the root: a zero vector must have a finite gradient, and 1e-12 is too small to be seen at
# float32 for any vector that is not numerically zero (1e-8 already costs 4e-10).
L2_EPS = 1e-12


def identity(x: Tensor) -> Tensor:
    """φ(x) = x."""
    return x


def l2(x: Tensor) -> Tensor:
    """φ(x) = x / ‖x‖ over the head dimension, 0 at 0."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def elu1(x: Tensor) -> Tensor:
    """φ(x) = ELU(x) + 1 written so that it stays positive: elu(x) + 1 is exactly 0 below −17 in float32."""
    return torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0)))


FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": identity,
    "l2": l2,
    "elu1": elu1,
    "relu": F.relu,
    "exp": torch.exp,
}


@dataclass(frozen=True)
class Normaliser:
    """a(d, n) and b(d, n) of one normaliser; ``scale`` and ``eps`` are the primitive's arguments.

    ``needs_d`` / ``needs_u`` say what a backend may leave out.
    """

    ab: Callable[[Tensor, Tensor, float, float | Tensor], tuple[Tensor, Tensor]]
    needs_d: bool = True
    needs_u: bool = True


def _mala(d: Tensor, n: Tensor, scale: float, eps: float | Tensor) -> tuple[Tensor, Tensor]:
    c = scale / n
    z = c * d
    return c * (1 + 1 / (z + eps)), -z / n


NORMALISERS: dict[str, Normaliser] = {
    # eps beside the MEAN d/n, as the released MALA, RALA, PolaFormer, NaLaFormer and FLatten code has it
    "mean": Normaliser(lambda d, n, scale, eps: (1 / (d + n * eps), torch.zeros_like(d)), needs_u=False),
    # eps beside the SUM d, as EfficientViT has it
    "sum": Normaliser(lambda d, n, scale, eps: (1 / (d + eps), torch.zeros_like(d)), needs_u=False),
    "affine": Normaliser(lambda d, n, scale, eps: (1 / (n + d), 1 / (n + d))),
    "half": Normaliser(lambda d, n, scale, eps: (torch.full_like(d, 0.5), torch.full_like(d, 0.5)), needs_d=False),
    "half_mean": Normaliser(lambda d, n, scale, eps: (0.5 / n + 0 * d, 0.5 / n + 0 * d), needs_d=False),
    "mala": Normaliser(_mala),
    "inline": Normaliser(lambda d, n, scale, eps: (scale / n + 0 * d, (1 - scale * d / n) / n)),
    "none": Normaliser(
        lambda d, n, scale, eps: (torch.ones_like(d), torch.zeros_like(d)), needs_d=False, needs_u=False
    ),
}
