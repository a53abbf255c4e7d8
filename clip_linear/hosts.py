"""The attention classes that get a body: each is a subclass of the class that stood there, with its Parameter objects.

So names, initial values and the random stream of a swapped model are those of the softmax model, and everything that
looks for the old class (``convert_weights_to_lp``, for one) still finds it.
"""

from __future__ import annotations

import torch
from open_clip.transformer import Attention as OpenClipAttention
from timm.layers.attention import Attention as TimmAttention
from torch import Tensor, nn
from torch.nn import functional as F

from clip_linear.attention import AttentionBody, Tokens, split_heads


class _Host:
    """What all hosts share: the body and what is known of the tokens before the call."""

    body: AttentionBody
    tokens: Tokens
    num_heads: int

    def _tokens(self, x: Tensor, attn_mask: Tensor | None) -> Tokens:
        """The Tokens of this call. Raises ValueError for a mask that is neither causal nor a key mask."""
        if attn_mask is None:
            if self.tokens.causal:
                raise ValueError("this tower was built causal but was called without its mask")
            return self.tokens
        raise_unless_causal(attn_mask, self.tokens.causal)
        return self.tokens


def raise_unless_causal(mask: Tensor, causal: bool) -> None:
    """Linear attention cannot apply an arbitrary mask, so any other than the tower's own causal one is refused.

    The look at the values is left out under torch.compile and on accelerators, where it would cost a graph break or a
    wait for the device; there the shape alone is checked.
    """
    length = mask.shape[-1]
    known = causal and mask.ndim == 2 and mask.shape[0] == length
    if known and mask.device.type == "cpu" and not torch.compiler.is_compiling():
        allowed = mask == 0 if mask.is_floating_point() else ~mask
        known = bool(torch.equal(allowed, torch.ones(length, length, dtype=torch.bool).tril()))
    if not known:
        raise ValueError(
            f"attention mask of shape {tuple(mask.shape)} is not the causal mask this tower was built with; "
            "linear attention supports causal and key masks only"
        )


class SwappedMultiheadAttention(_Host, nn.MultiheadAttention):
    """For ``nn.MultiheadAttention`` as OpenCLIP's ResidualAttentionBlock calls it (batch first, self-attention)."""

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """query = key = value [B, N, C] -> ([B, N, C], None)."""
        if key is not query or value is not query or key_padding_mask is not None:
            raise ValueError(
                "a swapped block is self-attention without key_padding_mask; cross-attention stays softmax"
            )
        qkv = F.linear(query, self.in_proj_weight, self.in_proj_bias)
        q, k, v = (split_heads(t, self.num_heads) for t in qkv.chunk(3, -1))
        return self.out_proj(self.body(query, q, k, v, self._tokens(query, attn_mask))), None


class SwappedAttention(_Host, OpenClipAttention):
    """For OpenCLIP's own ``Attention`` (custom blocks, with their qk_norm, scale_heads and inner_norm)."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """x [B, N, C] -> [B, N, C]."""
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = (split_heads(t, self.num_heads) for t in qkv.chunk(3, -1))
        o = self.body(x, self.ln_q(q), self.ln_k(k), v, self._tokens(x, attn_mask))
        if self.head_scale is not None:
            o = (o.unflatten(-1, (self.num_heads, -1)) * self.head_scale[:, :, 0]).flatten(2)
        return self.out_drop(self.out_proj(self.ln_inner(o)))


class SwappedTimmAttention(_Host, TimmAttention):
    """For ``timm.layers.attention.Attention`` (timm ViTs, SigLIP's image towers), also with qk-norm."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """x [B, N, C] -> [B, N, C]."""
        if is_causal:
            raise ValueError("a swapped timm block is bidirectional; is_causal=True is not supported")
        q, k, v = (split_heads(t, self.num_heads) for t in self.qkv(x).chunk(3, -1))
        o = self.norm(self.body(x, self.q_norm(q), self.k_norm(k), v, self._tokens(x, attn_mask)))
        gate = getattr(self, "gate", None)  # timm's own output gate, newer than timm 1.0.20
        if gate is not None:
            o = o * gate(x).sigmoid()
        return self.proj_drop(self.proj(o))


HOSTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.MultiheadAttention: SwappedMultiheadAttention,
    OpenClipAttention: SwappedAttention,
    TimmAttention: SwappedTimmAttention,
}
