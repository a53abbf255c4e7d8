"""Focused linear attention."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from clip_linear.attention import Dress, Tokens, Variant, rotate, wide
from clip_linear.blocks import by_blocks
from clip_linear.features import add_positions
from clip_linear.registry import VariantInfo
from clip_linear_kernels import linear_attention
from clip_linear_kernels.spec import FOCUS_EPS


class Focused(Variant):
    """o_i = f(q_i) Σ_j f(k_j)ᵀ v_j / (f(q_i)·Σ_j f(k_j) + n ε), ε = 1e-6.

    f(x) = ‖r‖ r^p / ‖r^p‖ with r = (ReLU(x) + 1e-6) / softplus(scale), element-wise powers p = 3; norms span ALL
    channels, before the split into heads, which couples the heads. Han et al. 2023, "FLatten Transformer", arXiv
    2308.00442, eq. 5–6 and 12 (written there without the denominator that its eq. 3 and the code have). The 1e-6, the
    learned ``scale`` [1, 1, H·D] (0 at first: a division by ln 2) and the positional encoding of the keys
    [1, N, H·D] are the released code's.
    """

    info = VariantInfo(
        name="focused",
        equation="oᵢ = f(qᵢ)·Σⱼf(kⱼ)ᵀvⱼ / f(qᵢ)·Σⱼf(kⱼ), f(x) = ‖r‖r³/‖r³‖, r = ReLU(x), norms over all heads",
        source="Han et al. 2023, arXiv 2308.00442",
        title="FLatten Transformer: Vision Transformer using Focused Linear Attention",
        bibtex="@inproceedings{han2023flatten, title={{FLatten} Transformer: Vision Transformer using Focused Linear "
        "Attention}, author={Han, Dongchen and Pan, Xuran and Han, Yizeng and Song, Shiji and Huang, Gao}, "
        "booktitle={ICCV}, year={2023}, eprint={2308.00442}, archivePrefix={arXiv}}",
        causal_source="derived",
        state_per_head="D·E + D",
        tensors={"scale": "C"},
        options={
            "scale": "[1, 1, H·D]: q and k are divided by its softplus",
            "positional_encoding": "[1, N, H·D]: added to the keys",
            "focusing_factor": "the power p (default 3)",
        },
    )
    scale: Tensor
    paper = Dress(local="dw5_shared", table=True)

    @staticmethod
    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        scale: Tensor | None = None,
        positional_encoding: Tensor | None = None,
        focusing_factor: float = 3,
    ) -> Tensor:
        """Shapes of Variant.attention."""
        H, D = q.shape[1], q.shape[-1]
        q, k = rotate(q, rope), rotate(add_positions(k, positional_encoding), rope)
        scale = wide(q).new_zeros(1, 1, H * D) if scale is None else scale.to(wide(q).dtype)
        divisor = F.softplus(scale)

        def focus(x: Tensor, divisor: Tensor) -> Tensor:  # [B, N, H, D]
            r = (F.relu(wide(x)) + FOCUS_EPS) / divisor
            unit = r / r.detach().amax((2, 3), keepdim=True)  # the scale of r^p cancels; so nothing over- or underflows
            sharp = unit**focusing_factor
            return sharp * (_norm(r) / _norm(sharp))

        q, k = (by_blocks(focus, x.transpose(1, 2), divisor.view(1, 1, H, D)).transpose(1, 2) for x in (q, k))
        return linear_attention(q, k, v, normaliser="mean", causal=causal, key_mask=key_mask)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, rope: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """The equation with this module's scale."""
        own = {"scale": self.scale.view(1, 1, -1), **self.options}
        return self.attention(q, k, v, causal=tokens.causal, key_mask=tokens.key_mask, rope=rope, **own)


def _norm(x: Tensor) -> Tensor:
    # Over all heads: [B, N, H, D] -> [B, N, 1, 1].
    return x.square().sum((2, 3), keepdim=True).sqrt()
