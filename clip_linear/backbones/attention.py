"""The one attention of all backbones: projections round an ``AttentionBody``; which variant is data."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from clip_linear.attention import AttentionBody, Tokens, split_heads
from clip_linear.backbones.resizing import resize
from clip_linear.dress import Dress, Site
from clip_linear.errors import UserError
from clip_linear.registry import variant_class


class TokenAttention(nn.Module):
    """q, k, v -> body -> projection on tokens [B, N, C].

    With ``reduction`` r > 1, keys and values come from an r×r strided convolution of the grid (PVT's spatial
    reduction); a local term then works on values that are interpolated back along the token axis, as in FLatten and
    PolaFormer.
    """

    def __init__(
        self, variant: str, dress: Dress, site: Site, reduction: int = 1, options: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        C = site.width
        if C % site.num_heads:
            raise UserError(f"width {C} is not a multiple of {site.num_heads} heads")
        if reduction > 1 and dress.local == "dynamic3":
            raise UserError("spatial reduction with InLine's local term does not exist; set its reduction to 1")
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.body = AttentionBody(variant_class(variant)(site, **(options or {})), dress, site)
        self.reduction = reduction
        if reduction > 1:
            self.sr, self.norm = nn.Conv2d(C, C, reduction, reduction), nn.LayerNorm(C)

    def resize_window(self, window: int) -> None:
        """Another grid, window × window: positions of the keys are interpolated. Raises UserError."""
        site, table = self.body.site, self.body.table
        if site.grid == (window, window):
            return
        assert site.grid is not None
        info = self.body.variant.info
        if any("N" in formula or "G" in formula for formula in info.tensors.values()):
            raise UserError(
                f"variant {info.name!r} is tied to its number of tokens; build the model at this image size"
            )
        if table is not None:
            rows = resize(table.data.view(-1, site.width), 0, site.grid, (window, window))
            self.body.table = nn.Parameter(rows.flatten())
        self.body.site = dataclasses.replace(site, grid=(window, window), length=window * window)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [B, N, C] -> [B, N, C]."""
        H = self.body.site.num_heads
        if self.reduction == 1:
            q, k, v = (split_heads(t, H) for t in self.qkv(x).chunk(3, -1))
            return self.proj(self.body(x, q, k, v, tokens))
        grid = self.sr(tokens.to_grid(x))
        keys = Tokens(grid=(grid.shape[2], grid.shape[3]))
        C, bias = x.shape[-1], self.qkv.bias
        q = split_heads(F.linear(x, self.qkv.weight[:C], bias[:C]), H)
        reduced = self.norm(keys.from_grid(grid))
        k, v = (split_heads(t, H) for t in F.linear(reduced, self.qkv.weight[C:], bias[C:]).chunk(2, -1))
        local_v = F.interpolate(v.flatten(0, 1).mT, size=x.shape[1], mode="linear").mT.unflatten(0, v.shape[:2])
        return self.proj(self.body(x, q, k, v, tokens, keys=keys, local_v=local_v))


class Mlp(nn.Module):
    """Linear, exact GELU, linear; with ``conv`` u + dw3×3(u) between (MAViT, RAVLT, NaLaFormer)."""

    def __init__(self, width: int, hidden: int, conv: bool = False) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden) if conv else None

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [B, N, C] -> [B, N, C]."""
        u = F.gelu(self.fc1(x))
        if self.dwconv is not None:
            u = u + tokens.from_grid(self.dwconv(tokens.to_grid(u)))
        return self.fc2(u)
