"""Enhanced linear attention: ReLU attention with a convolution in the MLP."""

from __future__ import annotations

from torch import Tensor

from clip_linear.attention import Dress, Variant, rotate
from clip_linear.registry import VariantInfo
from clip_linear_kernels import linear_attention

EPS = 1e-5  # beside the SUM, as in timm's port


class Enhanced(Variant):
    """o_i = φ(q_i) Σ_j φ(k_j)ᵀ v_j / (φ(q_i)·Σ_j φ(k_j) + ε), φ = ReLU, ε = 1e-5 beside the sum.

    Cai et al. 2022, "Enhanced Linear Attention for High-Resolution Low-Computation Visual Recognition" (EfficientViT,
    first version), arXiv 2205.14756. Its other half, the ``paper`` preset, is a 3×3 depth-wise convolution on the
    hidden tokens of the MLP, between its two layers; prefix tokens pass by. On text it is causal with
    3 taps. A token whose q is all negative gives 0. The multi-scale aggregation of later versions is not part of this.
    """

    info = VariantInfo(
        name="enhanced",
        equation="oᵢ = φ(qᵢ)·Σⱼφ(kⱼ)ᵀvⱼ / (φ(qᵢ)·Σⱼφ(kⱼ) + ε), φ = ReLU; depth-wise 3×3 in the MLP",
        source="Cai et al. 2022, arXiv 2205.14756",
        title="EfficientViT: Enhanced Linear Attention for High-Resolution Low-Computation Visual Recognition",
        bibtex="@misc{cai2022efficientvit, title={{EfficientViT}: Enhanced Linear Attention for High-Resolution "
        "Low-Computation Visual Recognition}, author={Cai, Han and Gan, Chuang and Han, Song}, year={2022}, "
        "eprint={2205.14756}, archivePrefix={arXiv}}",
        causal_source="derived",
        state_per_head="D·E + D",
    )
    paper = Dress(mlp_conv=True)

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
        return linear_attention(
            rotate(q, rope),
            rotate(k, rope),
            v,
            feature="relu",
            normaliser="sum",
            causal=causal,
            key_mask=key_mask,
            eps=EPS,
        )
