"""Hydra attention: one head per channel."""

from __future__ import annotations

import torch
from torch import Tensor

from clip_linear.attention import Variant, rotate, wide
from clip_linear.registry import VariantInfo
from clip_linear_kernels import diagonal_attention
from clip_linear_kernels.spec import L2_EPS


class Hydra(Variant):
    """o_ic = q̂_ic Σ_j k̂_jc v_jc for each channel c, q̂ = q/‖q‖ over ALL channels, before any split into heads.

    Bolya et al. 2022, "Hydra Attention", arXiv 2209.07484: as many heads as channels, so that num_heads plays no part.
    No normaliser and no 1/N: the output is a sum that grows with the number of tokens. Causal: a prefix sum.
    """

    info = VariantInfo(
        name="hydra",
        equation="oᵢ = q̂ᵢ ⊙ Σⱼ k̂ⱼ ⊙ vⱼ, q̂ = q/‖q‖ over all channels",
        source="Bolya et al. 2022, arXiv 2209.07484",
        title="Hydra Attention: Efficient Attention with Many Heads",
        bibtex="@misc{bolya2022hydra, title={Hydra Attention: Efficient Attention with Many Heads}, author={Bolya, "
        "Daniel and Fu, Cheng-Yang and Dai, Xiaoliang and Zhang, Peizhao and Hoffman, Judy}, year={2022}, "
        "eprint={2209.07484}, archivePrefix={arXiv}}",
        causal_source="derived",
        state_per_head="E",
        macs="2·N·D",
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
    ) -> Tensor:
        """Shapes of Variant.attention; D = E."""

        def unit(x: Tensor) -> Tensor:
            x = wide(x)
            return x * torch.rsqrt(x.square().sum((1, 3), keepdim=True) + L2_EPS)

        return diagonal_attention(unit(rotate(q, rope)), unit(rotate(k, rope)), v, causal=causal, key_mask=key_mask)
