"""Polarity-aware linear attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from clip_linear.attention import Dress, Tokens, Variant, rotate, wide
from clip_linear.blocks import by_blocks
from clip_linear.errors import UserError
from clip_linear.features import add_positions
from clip_linear.registry import VariantInfo
from clip_linear_kernels import linear_attention


class Pola(Variant):
    """o_i = [same-sign stream on the first half of v's channels, opposite-sign stream on the second half].

    With x' = x / softplus(scale), f(x) = [x'₊^p, x'₋^p] (2D features, x₊ = max(x, 0), x₋ = max(−x, 0)) and
    p = 1 + α sigmoid(power), each stream is f(q_i) Σ_j f(k_j)ᵀ v_j / (f(q_i)·Σ_j f(k_j) + n ε), ε = 1e-6; the second
    one swaps the halves of f(q). Meng et al. 2025, "PolaFormer", arXiv 2501.15061, eq. 6–9.

    Where paper and released code differ, this is the code: the paper's sign-aware matrices G are a linear gate
    (part of the core preset), the scale and the positional encoding of the keys are FLatten's, and nothing is
    subtracted. ``power`` [1, H, 1, D] and ``scale`` [1, 1, H·D] start at 0, so that p = 3 and the divisor is ln 2.
    """

    info = VariantInfo(
        name="pola",
        equation="oᵢ = [same(qᵢ,k)·v₁, opposite(qᵢ,k)·v₂], f(x) = [x₊ᵖ, x₋ᵖ], p = 1 + α·sigmoid(w)",
        source="Meng et al. 2025, arXiv 2501.15061",
        title="PolaFormer: Polarity-aware Linear Attention for Vision Transformers",
        bibtex="@inproceedings{meng2025polaformer, title={{PolaFormer}: Polarity-aware Linear Attention for Vision "
        "Transformers}, author={Meng, Weikang and Luo, Yadan and Li, Xin and Jiang, Dongmei and Zhang, Zheng}, "
        "booktitle={ICLR}, year={2025}, eprint={2501.15061}, archivePrefix={arXiv}}",
        causal_source="derived",
        state_per_head="2·D·E + 2·D",
        streams=(("2·D", "E/2"), ("2·D", "E/2")),
        tensors={"power": "C", "scale": "C"},
        options={
            "power": "[1, H, 1, D]: p = 1 + alpha·sigmoid(power)",
            "scale": "[1, 1, H·D]: q and k are divided by its softplus",
            "positional_encoding": "[1, N, H·D]: added to the keys",
            "alpha": "largest power less one (default 4)",
        },
    )
    core = Dress(gate="linear")
    power: Tensor
    scale: Tensor
    paper = Dress(local="dw5_shared", gate="linear", table=True)

    @staticmethod
    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        power: Tensor | None = None,
        scale: Tensor | None = None,
        positional_encoding: Tensor | None = None,
        alpha: float = 4.0,
    ) -> Tensor:
        """Shapes of Variant.attention. Raises UserError for an odd head_dim of v."""
        if v.shape[-1] % 2:
            raise UserError(f"head_dim {v.shape[-1]} is odd; pola splits each head's channels in halves")
        H, D = q.shape[1], q.shape[-1]
        q, k = wide(rotate(q, rope)), wide(rotate(add_positions(k, positional_encoding), rope))
        scale = q.new_zeros(1, 1, H * D) if scale is None else scale.to(q.dtype)
        power = q.new_zeros(1, H, 1, D) if power is None else power.to(q.dtype)
        divisor, p = F.softplus(scale).view(1, H, 1, D), 1 + alpha * torch.sigmoid(power)

        def streams(q: Tensor, k: Tensor, v: Tensor, divisor: Tensor, p: Tensor, keep: Tensor | None) -> Tensor:
            mask = None if keep is None else keep[:, 0, :, 0]
            q, k = q / divisor, k / divisor
            up, down = F.relu(q) ** p, F.relu(-q) ** p
            keys = torch.cat([F.relu(k) ** p, F.relu(-k) ** p], -1)  # [B, H, M, 2D]
            both = torch.cat([up, down], -1), torch.cat([down, up], -1)
            out = [
                linear_attention(f, keys, half, normaliser="mean", causal=causal, key_mask=mask)
                for f, half in zip(both, v.chunk(2, -1))
            ]
            return torch.cat(out, -1)

        return by_blocks(streams, q, k, v, divisor, p, None if key_mask is None else key_mask[:, None, :, None])

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, rope: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """The equation with this module's power and scale."""
        H, D = q.shape[1], q.shape[-1]
        own = {"power": self.power.view(1, H, 1, D), "scale": self.scale.view(1, 1, H * D), **self.options}
        return self.attention(q, k, v, causal=tokens.causal, key_mask=tokens.key_mask, rope=rope, **own)
