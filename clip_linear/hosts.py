"""The attention classes that get a body: each is a subclass of the class that stood there, with its Parameter objects.

So names, initial values and the random stream of a swapped model are those of the softmax model, and everything that
looks for the old class (``convert_weights_to_lp``, for one) still finds it.
"""

from __future__ import annotations

import inspect
from typing import Any

from open_clip.transformer import Attention as OpenClipAttention
from timm.layers.attention import Attention as TimmAttention
from torch import Tensor, nn
from torch.nn import functional as F

from clip_linear.attention import AttentionBody, Tokens, split_heads
from clip_linear.layout import Layout
from clip_linear.masks import with_mask


class Host:
    """What all hosts share: the body and the layout of the tower."""

    body: AttentionBody
    layout: Layout
    num_heads: int
    true_is_masked = False  # in a boolean mask

    def _tokens(self, x: Tensor, mask: Tensor | None) -> Tokens:
        tokens = self.layout.tokens(x.shape[1], self.body.needs_grid)
        return with_mask(tokens, mask, self.num_heads, self.true_is_masked)


class SwappedMultiheadAttention(Host, nn.MultiheadAttention):
    """For ``nn.MultiheadAttention`` as OpenCLIP's ResidualAttentionBlock calls it (batch first, self-attention)."""

    true_is_masked = True

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
        """query = key = value [B, N, C] -> ([B, N, C], None). Raises ValueError for any other use."""
        if key is not query or value is not query or key_padding_mask is not None:
            raise ValueError(
                "a swapped block is self-attention without key_padding_mask; cross-attention stays softmax"
            )
        qkv = F.linear(query, self.in_proj_weight, self.in_proj_bias)
        q, k, v = (split_heads(t, self.num_heads) for t in qkv.chunk(3, -1))
        return self.out_proj(self.body(query, q, k, v, self._tokens(query, attn_mask))), None


class OpenClipHost(Host):
    """``forward`` for OpenCLIP's own ``Attention``: that of 3.x, used by custom blocks, and that of its main branch.

    The main branch calls every attention as (x, k_x, v_x, attn_mask), and a True in its masks means "keep".
    """

    def forward(
        self, x: Tensor, k_x: Tensor | None = None, v_x: Tensor | None = None, attn_mask: Tensor | None = None
    ) -> Tensor:
        """x [B, N, C] -> [B, N, C]. Raises ValueError for cross-attention."""
        me: Any = self
        if (k_x is not None and k_x is not x) or (v_x is not None and v_x is not x):
            raise ValueError("a swapped block is self-attention; cross-attention stays softmax")
        qkv = F.linear(x, me.in_proj_weight, me.in_proj_bias)
        q, k, v = (split_heads(t, self.num_heads) for t in qkv.chunk(3, -1))
        q, k = _through(me, "ln_q", q), _through(me, "ln_k", k)
        o = self.body(x, q, k, v, self._tokens(x, attn_mask))
        if getattr(me, "head_scale", None) is not None:
            o = (o.unflatten(-1, (self.num_heads, -1)) * me.head_scale[:, :, 0]).flatten(2)
        return _through(me, "out_drop", me.out_proj(_through(me, "ln_inner", o)))


def _through(module: nn.Module, name: str, x: Tensor) -> Tensor:
    part = getattr(module, name, None)
    return x if part is None else part(x)


class SwappedAttention(OpenClipHost, OpenClipAttention):  # type: ignore[misc]
    """For OpenCLIP's own ``Attention``, with its qk_norm, scale_heads and inner_norm."""

    true_is_masked = "k_x" not in inspect.signature(OpenClipAttention.forward).parameters


class SwappedTimmAttention(Host, TimmAttention):
    """For ``timm.layers.attention.Attention`` (timm ViTs, SigLIP's image towers), also with qk-norm."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """x [B, N, C] -> [B, N, C]. Raises ValueError for causal use."""
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


class HiddenHook:
    """Runs a body's MLP convolution behind the first layer of its block's MLP."""

    def __init__(self, body: AttentionBody, layout: Layout) -> None:
        self.body, self.layout = body, layout

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """output [B, N, M] -> [B, N, M]."""
        assert self.body.mlp_conv is not None
        return self.body.mlp_conv.convolve(output, self.layout.tokens(output.shape[1], True))
