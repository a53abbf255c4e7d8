"""Magnitude-aware linear attention."""

from __future__ import annotations

from torch import Tensor

from clip_linear.attention import Dress, Variant, rotate, wide
from clip_linear.registry import VariantInfo
from clip_linear_kernels import linear_attention
from clip_linear_kernels.spec import elu1


class Mala(Variant):
    """o_i = β_i c φ(q_i) Σ_j φ(k_j)ᵀ v_j − γ_i Σ_j v_j, z_i = c φ(q_i)·Σ_j φ(k_j), β_i = 1 + 1/(z_i + ε), γ_i = z_i/n.

    φ = ELU + 1, c = D^-½ / n. Fan et al. 2025, "Rectifying Magnitude Neglect in Linear Attention", arXiv 2507.00698.
    The released code has the factor c that the paper's formula lacks (unscaled, weights are about a thousand times
    larger); the code is the default here. Rotary embeddings rotate φ(q) and φ(k) in the sum over v only, never in z, so
    that with them the weights no longer add up to 1. Negative weights are normal. ε = 1e-6 stands where the code has
    it. The causal form (ours) takes n, and with it c, as the number of keys seen so far.
    """

    info = VariantInfo(
        name="mala",
        equation="oᵢ = βᵢ φ(qᵢ)·Σⱼφ(kⱼ)ᵀvⱼ − γᵢ Σⱼvⱼ, βᵢ = 1 + 1/zᵢ, γᵢ = zᵢ/N",
        source="Fan et al. 2025, arXiv 2507.00698",
        title="Rectifying Magnitude Neglect in Linear Attention",
        causal_source="derived",
        state_per_head="D·E + D + E",
    )
    paper = Dress(rope=True, local="dw5", gate="linear")

    @staticmethod
    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Shapes of Variant.attention."""
        q, k = elu1(wide(q)), elu1(wide(k))
        return linear_attention(
            rotate(q, rope),
            rotate(k, rope),
            v,
            q_den=q,
            k_den=k,
            normaliser="mala",
            scale=q.shape[-1] ** -0.5,
            causal=causal,
            key_mask=key_mask,
        )
