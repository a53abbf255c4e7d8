"""Affine linear attention without a denominator."""

from __future__ import annotations

from torch import Tensor

from clip_linear.attention import Variant, rotate
from clip_linear.errors import unknown
from clip_linear.registry import VariantInfo
from clip_linear_kernels import linear_attention

_NORMALISERS = {"sum": "half", "mean": "half_mean"}


class AffineEq7(Variant):
    """o_i = ½ Σ_j (1 + q̂_i·k̂_j) v_j = ½ (u + q̂_i S), q̂ = q/‖q‖ per head.

    Gerami, Madani and Duraiswami 2026, arXiv 2604.10064, eq. 7. The factor ½ puts each score in [0, 1]; there is no
    denominator, so the output is a SUM that grows with the number of keys N (∝ N where the mean of v is not 0, ∝ √N
    otherwise). ``output_scale="mean"`` (ours) divides by the number of keys: one wants it when training and evaluation
    differ in N (patch dropout, resolution, padding) and in half precision, where large sums drown the part that
    depends on the query. ``"sum"`` is the paper's and the default.
    """

    info = VariantInfo(
        name="affine_eq7",
        equation="oᵢ = ½ Σⱼ(1 + q̂ᵢ·k̂ⱼ)vⱼ, q̂ = q/‖q‖",
        source="Gerami et al. 2026, arXiv 2604.10064, eq. 7",
        bibtex="@misc{gerami2026affine, author={Gerami and Madani and Duraiswami}, year={2026}, "
        "eprint={2604.10064}, archivePrefix={arXiv}}",
        causal_source="paper",
        state_per_head="D·E + E",
        options={"output_scale": '"sum" (published) or "mean" (divided by the number of keys)'},
    )

    @staticmethod
    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        output_scale: str = "sum",
    ) -> Tensor:
        """Shapes of Variant.attention."""
        if output_scale not in _NORMALISERS:
            raise unknown("output_scale of affine_eq7", output_scale, _NORMALISERS, 'use "sum" or "mean"')
        return linear_attention(
            rotate(q, rope),
            rotate(k, rope),
            v,
            feature="l2",
            normaliser=_NORMALISERS[output_scale],
            causal=causal,
            key_mask=key_mask,
        )
