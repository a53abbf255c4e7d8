"""The local terms of published modules: convolutions of v over the grid, added to the attention's output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from clip_linear.errors import unknown

if TYPE_CHECKING:
    from clip_linear.attention import Tokens
    from clip_linear.dress import Site


class DepthwiseConv(nn.Module):
    """K×K depth-wise convolution of v (LePE of MALA, RALA, NaLaFormer; with ``shared`` the DWC of FLatten and
    PolaFormer, whose weights are one head's and serve all heads). On text: the causal 1-D convolution with K taps.

    Prefix tokens take no part and get 0, not even the bias.
    """

    def __init__(self, site: Site, kernel: int = 5, shared: bool = False) -> None:
        super().__init__()
        self.kernel, self.repeats = kernel, site.num_heads if shared else 1
        channels = site.head_dim if shared else site.width
        conv = (nn.Conv1d if site.grid is None else nn.Conv2d)(channels, channels, kernel, groups=channels)
        self.weight, self.bias = conv.weight, conv.bias

    def forward(self, x: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
        """x is not used; v [B, H, N, D] -> [B, N, C]."""
        v = v.transpose(1, 2).flatten(2)  # [B, N, C]
        weight = self.weight.repeat(self.repeats, *([1] * (self.weight.ndim - 1))).to(v.dtype)
        bias = None if self.bias is None else self.bias.repeat(self.repeats).to(v.dtype)
        if tokens.grid is None:
            y = F.conv1d(F.pad(v.mT, (self.kernel - 1, 0)), weight, bias, groups=v.shape[-1])
            return y.mT
        return tokens.from_grid(F.conv2d(tokens.to_grid(v), weight, bias, padding=self.kernel // 2, groups=v.shape[-1]))


def make_local(kind: str | None, site: Site) -> nn.Module | None:
    """The local term of a dress: None, "dw5" (5×5, one filter a channel) or "dw5_shared" (shared by the heads)."""
    if kind is None:
        return None
    makers = {"dw5": lambda: DepthwiseConv(site), "dw5_shared": lambda: DepthwiseConv(site, shared=True)}
    if kind not in makers:
        raise unknown("local term", kind, makers, f"known: {', '.join(makers)}")
    return makers[kind]()
