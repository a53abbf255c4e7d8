"""Norm-aware linear attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from clip_linear.attention import Dress, Variant, rotate, wide
from clip_linear.blocks import by_blocks
from clip_linear.registry import VariantInfo
from clip_linear_kernels import linear_attention


class Nala(Variant):
    """o_i = f(q_i) Σ_j g(k_j)ᵀ v_j / (f(q_i)·Σ_j g(k_j) + n ε), 2D features, ε = 1e-6.

    f(q) = [q̂₊^p, q̂₋^p] with q̂ = q/‖q‖ per head and p = 3 (½ + tanh‖q‖), one number a token; g(k) = [(k³)₊, (k³)₋].
    Meng et al. 2025, "NaLaFormer", arXiv 2506.21137. Where paper and released code differ, this is the code: the
    paper's cosine of directions is a hard split by sign, and λ = 3, τ = ½ are constants. Rotary embeddings rotate each
    half of the features by the same table, in the sum over v only. A zero query gives 0 (the released code: NaN).
    """

    info = VariantInfo(
        name="nala",
        equation="oᵢ = f(qᵢ)·Σⱼg(kⱼ)ᵀvⱼ / f(qᵢ)·Σⱼg(kⱼ), f = [q̂₊ᵖ, q̂₋ᵖ], p = 3(½ + tanh‖q‖), g = [k³₊, k³₋]",
        source="Meng et al. 2025, arXiv 2506.21137",
        title="NaLaFormer: Norm-Aware Linear Attention for Transformer Models",
        bibtex="@misc{meng2025nalaformer, title={{NaLaFormer}: Norm-Aware Linear Attention for Transformer Models}, "
        "author={Meng, Weikang and Luo, Yadan and Huo, Liangyu and Wang, Yaowei and Li, Xin and Zhang, Zheng}, "
        "year={2025}, eprint={2506.21137}, archivePrefix={arXiv}}",
        causal_source="derived",
        state_per_head="2·D·E + 2·D",
        streams=(("2·D", "E"),),
    )
    paper = Dress(rope=True, local="dw5", norm=True, gate="silu")

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

        def core(
            q: Tensor, k: Tensor, v: Tensor, sin: Tensor | None, cos: Tensor | None, keep: Tensor | None
        ) -> Tensor:
            turn = None if sin is None or cos is None else (sin, cos)
            q_den, k_den = _features(wide(q), wide(k))
            return linear_attention(
                _rotate_halves(q_den, turn),
                _rotate_halves(k_den, turn),
                v,
                q_den=q_den,
                k_den=k_den,
                normaliser="mean",
                causal=causal,
                key_mask=None if keep is None else keep[:, 0, :, 0],
            )

        sin, cos = (None, None) if rope is None else (t.view(-1, 1, *t.shape[-2:]) for t in rope)
        return by_blocks(core, q, k, v, sin, cos, None if key_mask is None else key_mask[:, None, :, None])


def _features(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """f(q) and g(k), [B, H, N, 2D]."""
    square = q.square().sum(-1, keepdim=True)
    norm = torch.where(square > 0, square, 1).sqrt()  # of a zero query any norm will do: its features are 0
    p = 3 * (0.5 + torch.tanh(norm))
    q, k = q / norm, k * k * k
    return torch.cat([F.relu(q) ** p, F.relu(-q) ** p], -1), torch.cat([F.relu(k), F.relu(-k)], -1)


def _rotate_halves(x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
    return x if rope is None else torch.cat([rotate(half, rope) for half in x.chunk(2, -1)], -1)
