"""The local terms of published modules: convolutions of v over the grid, added to the attention's output.

On text they are causal in one dimension. Prefix tokens take no part: they get 0, not even the bias.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clip_linear.dress import Site, local_of

if TYPE_CHECKING:
    from clip_linear.attention import Tokens


class DepthwiseConv(nn.Module):
    """K×K depth-wise convolution (LePE of MALA, RALA, NaLaFormer; with ``repeats`` = H the DWC of FLatten and
    PolaFormer, whose weights are one head's and serve all heads). On text: K taps that end at the token itself.
    """

    def __init__(self, site: Site, channels: int, kernel: int, repeats: int = 1) -> None:
        super().__init__()
        self.kernel, self.repeats = kernel, repeats
        conv = (nn.Conv1d if site.grid is None else nn.Conv2d)(channels, channels, kernel, groups=channels)
        assert conv.bias is not None
        self.weight, self.bias = conv.weight, conv.bias

    def init_normal(self) -> DepthwiseConv:
        """The initial values of MALA, RALA and NaLaFormer instead of torch's."""
        nn.init.trunc_normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)
        return self

    def forward(self, x: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
        """x is not used; v [B, H, N, D] -> [B, N, C]."""
        return self.convolve(v.transpose(1, 2).flatten(2), tokens)

    def convolve(self, v: Tensor, tokens: Tokens) -> Tensor:
        """v [B, N, C] -> [B, N, C]; 0 at prefix tokens."""
        weight = self.weight.repeat(self.repeats, *([1] * (self.weight.ndim - 1))).to(v.dtype)
        bias = self.bias.repeat(self.repeats).to(v.dtype)
        if tokens.grid is None:
            v = F.pad(_kept(v, tokens).mT, (self.kernel - 1, 0))
            return F.conv1d(v, weight, bias, groups=v.shape[1]).mT
        return tokens.from_grid(F.conv2d(tokens.to_grid(v), weight, bias, padding=self.kernel // 2, groups=v.shape[-1]))


class HiddenConv(DepthwiseConv):
    """3×3 depth-wise convolution of an MLP's hidden tokens; prefix tokens pass by unchanged."""

    def __init__(self, site: Site) -> None:
        super().__init__(site, site.mlp_width, 3)

    def convolve(self, v: Tensor, tokens: Tokens) -> Tensor:
        """v [B, N, M] -> [B, N, M]."""
        y = super().convolve(v, tokens)
        return torch.cat([v[:, : tokens.prefix], y[:, tokens.prefix :]], 1) if tokens.prefix else y


class DynamicConv(nn.Module):
    """InLine's local residual: 3×3 filters for each sample and channel, made from the mean of the module's input x.

    The mean includes prefix tokens and is taken over the tokens that are there. On text: 3 taps that end at the token
    itself, made from the mean over the tokens that it may see.
    """

    def __init__(self, site: Site) -> None:
        super().__init__()
        C, groups, taps = site.width, site.num_heads, 3 if site.grid is None else 9
        self.net = nn.Sequential(nn.Conv1d(C, C, 1, groups=groups), nn.GELU(), nn.Conv1d(C, taps * C, 1, groups=groups))

    def forward(self, x: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
        """x [B, N, C], v [B, H, N, D] -> [B, N, C]."""
        v = v.transpose(1, 2).flatten(2)
        B, _, C = v.shape
        r = self.net(_mean(x, tokens).mT).to(v.dtype)  # [B, taps·C, 1], or [B, 3·C, N] for causal text
        if tokens.grid is None:
            windows = F.pad(_kept(v, tokens), (0, 0, 2, 0)).unfold(1, 3, 1)  # [B, N, C, 3]
            return (windows * r.unflatten(1, (C, 3)).permute(0, 3, 1, 2)).sum(-1)
        grid = tokens.to_grid(v)
        y = F.conv2d(grid.reshape(1, B * C, *tokens.grid), r.reshape(B * C, 1, 3, 3), padding=1, groups=B * C)
        return tokens.from_grid(y.view_as(grid))


def _kept(v: Tensor, tokens: Tokens) -> Tensor:
    return v if tokens.key_mask is None else v * tokens.key_mask[..., None]


def _mean(x: Tensor, tokens: Tokens) -> Tensor:
    # [B, N, C] -> the mean of the tokens that each token may see: [B, N, C] causal, else [B, 1, C]; summed in float32.
    wide = x if x.dtype == torch.float64 else x.float()
    keep = torch.ones_like(wide[..., :1]) if tokens.key_mask is None else tokens.key_mask[..., None].to(wide.dtype)
    if tokens.causal:
        mean = (wide * keep).cumsum(1) / keep.cumsum(1).clamp(min=1)
    else:
        mean = (wide * keep).sum(1, keepdim=True) / keep.sum(1, keepdim=True).clamp(min=1)
    return mean.to(x.dtype)


def make_local(kind: str | None, site: Site) -> nn.Module | None:
    """The local term of a dress, a key of ``dress.LOCALS``, or None. Raises UserError for one that is not known."""
    if kind is None:
        return None
    local_of(kind)
    if kind == "dynamic3":
        return DynamicConv(site)
    if kind == "dw5_shared":
        return DepthwiseConv(site, site.head_dim, 5, repeats=site.num_heads)
    return DepthwiseConv(site, site.width, 5).init_normal()
