"""cosFormer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clip_linear.attention import Site, Tokens, Variant, rotate, wide
from clip_linear.errors import UserError
from clip_linear.features import smallest
from clip_linear.registry import VariantInfo
from clip_linear_kernels import linear_attention


class Cosformer(Variant):
    """o_i = Σ_j a_ij v_j / Σ_j a_ij, a_ij = ReLU(q_i)·ReLU(k_j) cos(π/2 · (i − j)/M).

    Qin et al. 2022, "cosFormer: Rethinking Softmax in Attention", arXiv 2202.08791, eq. 9–10: cos(a − b) = cos a cos b
    + sin a sin b makes 2D features. Positions i count from 1 through the whole sequence, prefix tokens first, then the
    grid row by row (after patch dropout: by the kept indices). ``length`` is M: fixed, at least the number of tokens,
    by default that number; another M is another function. The released code clamps the sum at 1e-6; here a sum that is
    numerically 0 (an all-negative query) gives 0 and no other is touched.
    """

    info = VariantInfo(
        name="cosformer",
        equation="oᵢ = Σⱼaᵢⱼvⱼ / Σⱼaᵢⱼ, aᵢⱼ = φ(qᵢ)·φ(kⱼ)cos(π/2·(i−j)/M), φ = ReLU",
        source="Qin et al. 2022, arXiv 2202.08791",
        title="cosFormer: Rethinking Softmax in Attention",
        bibtex="@inproceedings{qin2022cosformer, title={{cosFormer}: Rethinking Softmax in Attention}, author={Qin, "
        "Zhen and Sun, Weixuan and Deng, Hui and Li, Dongxu and Wei, Yunshen and Lv, Baohong and Yan, Junjie and Kong, "
        "Lingpeng and Zhong, Yiran}, booktitle={ICLR}, year={2022}, eprint={2202.08791}, archivePrefix={arXiv}}",
        needs_grid=True,
        causal_source="paper",
        state_per_head="2·D·E + 2·D",
        streams=(("2·D", "E"),),
        options={
            "length": "M, at least the number of tokens (default: that number)",
            "positions": "[N] or [B, 1, N], counted from 1 (default 1 … N)",
        },
    )

    def __init__(self, site: Site, **options: Any) -> None:
        super().__init__(site, **options)
        self.length = site.length
        if options.get("length", self.length) < self.length:
            raise UserError(f"length {options['length']} of cosformer is below the tower's {self.length} tokens")

    @staticmethod
    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        length: int | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Shapes of Variant.attention, M = N. Raises UserError for a length below N or for M ≠ N."""
        N = q.shape[-2]
        if k.shape[-2] != N or (length is not None and length < N):
            raise UserError(f"cosformer of {N} queries and {k.shape[-2]} keys needs equal numbers and length ≥ {N}")
        q, k = F.relu(wide(rotate(q, rope))), F.relu(wide(rotate(k, rope)))
        if positions is None:
            positions = torch.arange(1, N + 1, device=q.device)
        angle = (math.pi / 2 * positions.to(q.dtype) / (length or N))[..., None]
        cos, sin = angle.cos(), angle.sin()
        q, k = (torch.cat([x * cos, x * sin], -1) for x in (q, k))
        return linear_attention(q, k, v, normaliser="sum", causal=causal, key_mask=key_mask, eps=smallest(q))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, rope: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """The equation with M = the number of tokens of the tower, and the kept positions after patch dropout."""
        own = {"length": max(self.length, q.shape[-2]), "positions": tokens.positions(), **self.options}
        return self.attention(q, k, v, causal=tokens.causal, key_mask=tokens.key_mask, rope=rope, **own)
