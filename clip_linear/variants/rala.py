"""Rank-augmented linear attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clip_linear.attention import Dress, Variant, rotate, wide
from clip_linear.features import smallest, visible_count, visible_sum
from clip_linear.registry import VariantInfo
from clip_linear_kernels import linear_attention
from clip_linear_kernels.spec import elu1

EPS = 1e-6  # beside the mean


class Rala(Variant):
    """o_i = φ(q_i) Σ_j α_j φ(k_j)ᵀ v_j / (φ(q_i)·Σ_j α_j φ(k_j) + n ε), α_j = n softmax_j(D^-½ q_g·φ(k_j)).

    q_g is the mean of φ(q) over the valid tokens, φ = ELU + 1, ε = 1e-6. Fan et al. 2025, "Breaking the Low-Rank
    Dilemma of Linear Attention", arXiv 2411.07635. Where paper and released code differ, this is the code: the mean is
    taken after φ, the exponent has D^-½, and there is a denominator. The paper's second factor φ(X) is a linear gate, a
    part of the equation and so of the core preset. Rotary embeddings rotate φ(q) and the weighted φ(k) in the sum over
    v only, never in the denominator.

    The causal form is ours, since α is twice non-causal: α_j = exp(D^-½ q_g⁽ʲ⁾·φ(k_j)), where q_g⁽ʲ⁾ is the mean over
    the tokens up to j, fixed once j is seen, divided by Σ_{m≤i} α_m. At the last token it does not equal the
    bidirectional form. Exponents are shifted by their maximum; in float32 weights below 1e-12 of the largest
    one, which may come later, are 1e-12 of it.
    """

    info = VariantInfo(
        name="rala",
        equation="oᵢ = φ(qᵢ)·Σⱼαⱼφ(kⱼ)ᵀvⱼ / φ(qᵢ)·Σⱼαⱼφ(kⱼ), α = N softmax(q̄·φ(k)/√D), φ = ELU + 1",
        source="Fan et al. 2025, arXiv 2411.07635",
        title="Breaking the Low-Rank Dilemma of Linear Attention",
        bibtex="@inproceedings{fan2025rala, title={Breaking the Low-Rank Dilemma of Linear Attention}, author={Fan, "
        "Qihang and Huang, Huaibo and He, Ran}, booktitle={CVPR}, year={2025}, eprint={2411.07635}, "
        "archivePrefix={arXiv}}",
        causal_source="derived",
        state_per_head="D·E + 2·D + 1",
        feature_macs="N·D",
    )
    core = Dress(gate="linear")
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
        """Shapes of Variant.attention. key_mask also leaves queries out of q_g where M = N."""
        q, k = elu1(wide(q)), elu1(wide(k))
        query_mask = key_mask if q.shape[-2] == k.shape[-2] else None
        mean = visible_sum(q, causal, query_mask) / visible_count(q, causal, query_mask)
        exponent = (mean * k).sum(-1) * k.shape[-1] ** -0.5  # [B, H, M]
        if key_mask is not None:
            exponent = exponent.masked_fill(~key_mask[:, None], torch.finfo(exponent.dtype).min)
        # The floor (1e-12 in float32) keeps the squared denominator of a causal row of such keys alone representable.
        floor = math.log(smallest(q) / EPS)
        weights = (exponent - exponent.detach().amax(-1, keepdim=True)).clamp(min=floor).exp()
        if key_mask is not None:
            weights = weights * key_mask[:, None]
        if not causal:
            keys = visible_count(k, False, key_mask)[..., 0]
            weights = weights * (keys / weights.sum(-1, keepdim=True).clamp(min=smallest(q)))
        return linear_attention(
            rotate(q, rope),
            rotate(k, rope),
            v,
            q_den=q,
            k_den=k,
            weights=weights,
            normaliser="mean",
            eps=EPS,
            causal=causal,
            key_mask=key_mask,
        )
