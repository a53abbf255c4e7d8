"""The tables that every backend obeys: feature maps φ and normalisers (a, b), with their derivatives.

Notation, per head: S = Σ_j w_j φ(k_j)ᵀ v_j  [F, E], s = Σ_j w_j φ(k_j)  [F], u = Σ_j w_j v_j  [E], n = Σ_j w_j, sums
over the keys that query i may see; y_i = φ(q_i) S and d_i = φ(q_i)·s. Every variant is

    o_i = a(d_i, n_i) y_i + b(d_i, n_i) u.

Kernels know rows by ``code``; they never know a variant's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# The reason for 1e-12 under the root: a zero vector must have a finite gradient, and 1e-12 is too small to be seen at
# float32 for any vector that is not numerically zero (1e-8 already costs 4e-10).
L2_EPS = 1e-12
# FLatten adds 1e-6 after the ReLU, so that an all-negative token has equal features instead of none.
FOCUS_EPS = 1e-6


def identity(x: Tensor) -> Tensor:
    """φ(x) = x."""
    return x


def l2(x: Tensor) -> Tensor:
    """φ(x) = x / ‖x‖ over the head dimension, 0 at 0."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def elu1(x: Tensor) -> Tensor:
    """φ(x) = ELU(x) + 1 written so that it stays positive: elu(x) + 1 is exactly 0 below −17 in float32."""
    return torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0)))


def focused3(x: Tensor) -> Tensor:
    """φ(x) = ‖r‖ r³/‖r³‖ with r = ReLU(x) + 1e-6, norms over the head dimension (FLatten, p = 3)."""
    r = torch.relu(x) + FOCUS_EPS
    cube = r * r * r
    return cube * (r.norm(dim=-1, keepdim=True) / cube.norm(dim=-1, keepdim=True))


def _d_l2(x: Tensor, phi: Tensor, g: Tensor) -> Tensor:
    r = torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
    return (g - phi * (phi * g).sum(-1, keepdim=True)) * r


def _d_focused3(x: Tensor, phi: Tensor, g: Tensor) -> Tensor:
    r = torch.relu(x) + FOCUS_EPS
    cube, slope = r * r * r, 3 * r * r
    m, c = r.norm(dim=-1, keepdim=True), cube.norm(dim=-1, keepdim=True)
    along = (g * cube).sum(-1, keepdim=True)
    d = slope * (g * (m / c) - cube * (along * m / c**3)) + r * (along / (c * m))
    return torch.where(x > 0, d, torch.zeros_like(d))


@dataclass(frozen=True)
class Feature:
    """One feature map: ``phi(x)`` and ``vjp(x, φ(x), g)`` = gᵀ ∂φ/∂x."""

    code: int
    phi: Callable[[Tensor], Tensor]
    vjp: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.phi(x)


FEATURES: dict[str, Feature] = {
    "identity": Feature(0, identity, lambda x, phi, g: g),
    "l2": Feature(1, l2, _d_l2),
    "elu1": Feature(2, elu1, lambda x, phi, g: g * phi.clamp(max=1)),
    "relu": Feature(3, torch.relu, lambda x, phi, g: g * (phi > 0)),
    "exp": Feature(4, torch.exp, lambda x, phi, g: g * phi),
    "focused3": Feature(5, focused3, _d_focused3),
}

Eps = float | Tensor
Coefficients = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Normaliser:
    """a(d, n) and b(d, n) of one normaliser; ``scale`` and ``eps`` are the primitive's arguments.

    ``by_d`` and ``by_n`` are (∂a, ∂b) by d and by n. ``needs_d`` / ``needs_u`` say what a backend may leave out.
    """

    code: int
    ab: Callable[[Tensor, Tensor, float, Eps], Coefficients]
    by_d: Callable[[Tensor, Tensor, float, Eps], Coefficients]
    by_n: Callable[[Tensor, Tensor, float, Eps], Coefficients]
    needs_d: bool = True
    needs_u: bool = True


def _mala(d: Tensor, n: Tensor, scale: float, eps: Eps) -> Coefficients:
    c = scale / n
    z = c * d
    return c * (1 + 1 / (z + eps)), -z / n


def _mala_by_d(d: Tensor, n: Tensor, scale: float, eps: Eps) -> Coefficients:
    c = scale / n
    return -((c / (c * d + eps)) ** 2), -c / n + 0 * d


def _mala_by_n(d: Tensor, n: Tensor, scale: float, eps: Eps) -> Coefficients:
    c = scale / n
    z = c * d
    r = 1 / (z + eps)
    return -c / n * (1 + r - z * r * r), 2 * z / (n * n)


def _same(x: Tensor) -> Coefficients:
    return x, x


def _zero(d: Tensor, n: Tensor, scale: float, eps: Eps) -> Coefficients:
    return _same(torch.zeros_like(d))


NORMALISERS: dict[str, Normaliser] = {
    # eps beside the MEAN d/n, as the released MALA, RALA, PolaFormer, NaLaFormer and FLatten code has it
    "mean": Normaliser(
        0,
        lambda d, n, scale, eps: (1 / (d + n * eps), torch.zeros_like(d)),
        lambda d, n, scale, eps: (-((d + n * eps) ** -2), torch.zeros_like(d)),
        lambda d, n, scale, eps: (-eps * (d + n * eps) ** -2, torch.zeros_like(d)),
        needs_u=False,
    ),
    # eps beside the SUM d, as EfficientViT has it
    "sum": Normaliser(
        1,
        lambda d, n, scale, eps: (1 / (d + eps), torch.zeros_like(d)),
        lambda d, n, scale, eps: (-((d + eps) ** -2), torch.zeros_like(d)),
        _zero,
        needs_u=False,
    ),
    "affine": Normaliser(
        2,
        lambda d, n, scale, eps: _same(1 / (n + d)),
        lambda d, n, scale, eps: _same(-((n + d) ** -2)),
        lambda d, n, scale, eps: _same(-((n + d) ** -2)),
    ),
    "half": Normaliser(3, lambda d, n, scale, eps: _same(torch.full_like(d, 0.5)), _zero, _zero, needs_d=False),
    "half_mean": Normaliser(
        4,
        lambda d, n, scale, eps: _same(0.5 / n + 0 * d),
        _zero,
        lambda d, n, scale, eps: _same(-0.5 / (n * n) + 0 * d),
        needs_d=False,
    ),
    "mala": Normaliser(5, _mala, _mala_by_d, _mala_by_n),
    "inline": Normaliser(
        6,
        lambda d, n, scale, eps: (scale / n + 0 * d, (1 - scale * d / n) / n),
        lambda d, n, scale, eps: (torch.zeros_like(d), -scale / (n * n) + 0 * d),
        lambda d, n, scale, eps: (-scale / (n * n) + 0 * d, (2 * scale * d / n - 1) / (n * n)),
    ),
    "none": Normaliser(
        7,
        lambda d, n, scale, eps: (torch.ones_like(d), torch.zeros_like(d)),
        _zero,
        _zero,
        needs_d=False,
        needs_u=False,
    ),
}
