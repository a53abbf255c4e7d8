"""Affine linear attention with a denominator."""

from __future__ import annotations

from torch import Tensor

from clip_linear.attention import Variant, rotate
from clip_linear.registry import VariantInfo
from clip_linear_kernels import linear_attention


class AffineEq4(Variant):
    """o_i = Σ_j (1 + q_i·k_j) v_j / Σ_j (1 + q_i·k_j) = (u + q_i S) / (n + q_i·s).

    Gerami, Madani and Duraiswami 2026, arXiv 2604.10064, eq. 4, with q and k L2-normalised per head (eq. 5), so that
    every score is ≥ 0. Without (``normalize_qk=False``) denominators cross zero and weights explode; nothing is
    clamped, since a clamp would be another function. No temperature and no 1/√D: the paper has none. The paper's sums
    run to i (causal); in an image tower they run over all tokens. Its bound 2/i on single weights does not hold.
    """

    info = VariantInfo(
        name="affine_eq4",
        equation="oᵢ = Σⱼ(1 + q̂ᵢ·k̂ⱼ)vⱼ / Σⱼ(1 + q̂ᵢ·k̂ⱼ), q̂ = q/‖q‖",
        source="Gerami et al. 2026, arXiv 2604.10064, eq. 4",
        bibtex="@misc{gerami2026affine, author={Gerami and Madani and Duraiswami}, year={2026}, "
        "eprint={2604.10064}, archivePrefix={arXiv}}",
        causal_source="paper",
        state_per_head="D·E + D + E",
        options={"normalize_qk": "L2-normalise q and k per head (default true)"},
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
        normalize_qk: bool = True,
    ) -> Tensor:
        """Shapes of Variant.attention."""
        return linear_attention(
            rotate(q, rope),
            rotate(k, rope),
            v,
            feature="l2" if normalize_qk else "identity",
            normaliser="affine",
            causal=causal,
            key_mask=key_mask,
        )
