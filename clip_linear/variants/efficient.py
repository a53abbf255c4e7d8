"""Efficient attention."""

from __future__ import annotations

import torch
from torch import Tensor

from clip_linear.attention import Variant, rotate, wide
from clip_linear.blocks import by_blocks
from clip_linear.features import smallest, visible_sum
from clip_linear.registry import VariantInfo
from clip_linear_kernels import linear_attention


class Efficient(Variant):
    """o_i = ρ_q(q_i) Σ_j ρ_k(k_j)ᵀ v_j, ρ_q a softmax over the D channels of a query, ρ_k one over the keys.

    Shen et al. 2018, "Efficient Attention: Attention with Linear Complexities", arXiv 1812.01243, the softmax
    normalisation of its section 3.2. Weights add up to 1. The causal form (ours) takes ρ_k over the keys seen so far:
    the query's channels are divided by the prefix sums of exp(k).
    """

    info = VariantInfo(
        name="efficient",
        equation="oᵢ = softmax_c(qᵢ)·Σⱼ softmaxⱼ(kⱼ)ᵀvⱼ",
        source="Shen et al. 2018, arXiv 1812.01243",
        title="Efficient Attention: Attention with Linear Complexities",
        bibtex="@inproceedings{shen2021efficient, title={Efficient Attention: Attention with Linear Complexities}, "
        "author={Shen, Zhuoran and Zhang, Mingyuan and Zhao, Haiyu and Yi, Shuai and Li, Hongsheng}, booktitle={WACV}, "
        "year={2021}, eprint={1812.01243}, archivePrefix={arXiv}}",
        causal_source="derived",
        state_per_head="D·E + D",
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
        """Shapes of Variant.attention."""

        def core(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
            q, k, mask = wide(q), wide(k), None if keep is None else keep[:, 0, :, 0]
            kept = k if keep is None else k.masked_fill(~keep, torch.finfo(k.dtype).min)
            k = (kept - kept.detach().amax(-2, keepdim=True)).exp()
            total = visible_sum(k, causal, mask).clamp(min=smallest(k))
            return linear_attention(torch.softmax(q, -1) / total, k, v, normaliser="none", causal=causal, key_mask=mask)

        keep = None if key_mask is None else key_mask[:, None, :, None]
        return by_blocks(core, rotate(q, rope), rotate(k, rope), v, keep)
