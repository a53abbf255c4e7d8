"""Injective linear attention."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from clip_linear.attention import Dress, Variant, rotate, wide
from clip_linear.errors import unknown
from clip_linear.registry import VariantInfo
from clip_linear_kernels import linear_attention

KERNELS = ("identity", "relu", "leakyrelu", "exp")


class Inline(Variant):
    """o_i = Σ_j (s_ij − mean_m s_im + 1/n) v_j, s_ij = φ(q_i)·φ(k_j) / (√D n): weights add up to exactly 1.

    Han et al. 2024, "Bridging the Divide", arXiv 2412.06590, eq. 5; the factor D^-½ / n is the released code's. No
    division, so no ε. ``kernel`` is φ: identity (the default of DeiT, PVT and CSwin), relu, leakyrelu (slope 0.01) or
    exp (of 0.2 x). The causal form (ours) takes n as the number of keys seen so far.
    """

    info = VariantInfo(
        name="inline",
        equation="oᵢ = Σⱼ(sᵢⱼ − mean(sᵢ) + 1/N)vⱼ, sᵢⱼ = φ(qᵢ)·φ(kⱼ)/(√D N)",
        source="Han et al. 2024, arXiv 2412.06590",
        title="Bridging the Divide: Reconsidering Softmax and Linear Attention",
        bibtex="@inproceedings{han2024bridging, title={Bridging the Divide: Reconsidering Softmax and Linear "
        "Attention}, author={Han, Dongchen and Pu, Yifan and Xia, Zhuofan and Han, Yizeng and Pan, Xuran and Li, Xiu "
        "and Lu, Jiwen and Song, Shiji and Huang, Gao}, booktitle={NeurIPS}, year={2024}, eprint={2412.06590}, "
        "archivePrefix={arXiv}}",
        causal_source="derived",
        state_per_head="D·E + D + E",
        options={"kernel": 'φ: "identity" (default), "relu", "leakyrelu" or "exp"'},
    )
    paper = Dress(local="dynamic3")

    @staticmethod
    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        kernel: str = "identity",
    ) -> Tensor:
        """Shapes of Variant.attention. Raises UserError for an unknown kernel."""
        if kernel not in KERNELS:
            raise unknown("kernel of inline", kernel, KERNELS, f"use one of: {', '.join(KERNELS)}")
        if kernel == "leakyrelu":
            q, k, kernel = F.leaky_relu(wide(q)), F.leaky_relu(wide(k)), "identity"
        elif kernel == "exp":
            q, k, kernel = (0.2 * wide(q)).exp(), (0.2 * wide(k)).exp(), "identity"
        elif rope is not None and kernel == "relu":
            q, k, kernel = F.relu(wide(q)), F.relu(wide(k)), "identity"
        return linear_attention(
            rotate(q, rope),
            rotate(k, rope),
            v,
            feature=kernel,
            normaliser="inline",
            scale=q.shape[-1] ** -0.5,
            causal=causal,
            key_mask=key_mask,
        )
