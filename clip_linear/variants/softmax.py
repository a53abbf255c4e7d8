"""Softmax attention: the control."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from clip_linear.attention import Variant, rotate
from clip_linear.registry import VariantInfo


class Softmax(Variant):
    """o_i = Σ_j softmax_j(q_i·k_j / √D + bias_ij) v_j, by torch's fused kernel.

    Vaswani et al. 2017, arXiv 1706.03762, eq. 1. A row whose keys are all masked gives 0 instead of NaN.
    """

    info = VariantInfo(
        name="softmax",
        equation="oᵢ = Σⱼ softmaxⱼ(qᵢ·kⱼ/√D) vⱼ",
        source="Vaswani et al. 2017, arXiv 1706.03762",
        bibtex="@inproceedings{vaswani2017attention, title={Attention Is All You Need}, author={Vaswani, Ashish and "
        "Shazeer, Noam and Parmar, Niki and Uszkoreit, Jakob and Jones, Llion and Gomez, Aidan N and Kaiser, "
        "{\\L}ukasz and Polosukhin, Illia}, booktitle={NeurIPS}, year={2017}, eprint={1706.03762}, "
        "archivePrefix={arXiv}}",
        causal_source="paper",
        state_per_head="N·(D + E)",
        macs="N²·(D + E)",
        options={"bias": "added to the scores, broadcastable to [B, H, N, M]"},
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
        bias: Tensor | None = None,
    ) -> Tensor:
        """Shapes of Variant.attention; bias broadcastable to [B, H, N, M]."""
        q, k = rotate(q, rope).to(v.dtype), rotate(k, rope).to(v.dtype)
        if key_mask is None and bias is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)[None, None]
        if causal:
            keep = keep.tril()
        if key_mask is not None:
            keep = keep & key_mask[:, None, None, :]
        score = q.new_zeros(()) if bias is None else bias.to(q.dtype)
        dead = ~keep.any(-1, keepdim=True)  # rows without any key: attend to everything, then zero the output
        mask = score.masked_fill(~(keep | dead), float("-inf")) if bias is not None else keep | dead
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).masked_fill(dead, 0)
