"""The plain ViT (DeiT) of InLine, class token first.

Touvron et al. 2021, arXiv 2012.12877; Han et al. 2024, arXiv 2412.06590.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clip_linear.attention import Tokens
from clip_linear.backbones.attention import TokenAttention
from clip_linear.backbones.flags import expand_flags
from clip_linear.backbones.pvt import Block, init_linear
from clip_linear.backbones.trunk import Trunk, drop_path_rates
from clip_linear.dress import Dress, Site
from clip_linear.positions import resize
from clip_linear.registry import declaration

_EPS = 1e-6


class PlainViT(Trunk):
    """Patches of 16 px, one stage, the class token as the feature. Positions are interpolated to other image sizes."""

    def __init__(
        self,
        *,
        variant: str = "inline",
        flags: str | Sequence[Any] = "l",
        dress: Dress | None = None,
        options: dict[str, Any] | None = None,
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        patch_size: int = 16,
        drop_path_rate: float = 0.0,
        num_classes: int = 1000,
        global_pool: str = "token",
        img_size: int | tuple[int, int] = 224,
    ) -> None:
        super().__init__(num_classes, global_pool, img_size)
        self.default_cfg["pool_size"] = None  # the feature is a token, not a map
        (kinds,) = expand_flags(flags, (depth,), variant)
        if dress is None:
            dress = declaration(variant).dress("paper" if declaration(variant).paper else "core", {})
        C, rates = embed_dim, drop_path_rates(drop_path_rate, depth)
        self.grid = (self.img_size[0] // patch_size, self.img_size[1] // patch_size)
        rows = 1 + self.grid[0] * self.grid[1]
        site = Site(width=C, num_heads=num_heads, grid=self.grid, length=rows, prefix=1)
        self.patch_embed = nn.Conv2d(3, C, patch_size, patch_size)
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(C)), nn.Parameter(torch.zeros(rows * C))
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        self.layers = nn.ModuleList(
            Block(
                TokenAttention(k, dress if k != "softmax" else Dress(), site, 1, options if k == variant else None),
                int(mlp_ratio * C),
                rate,
                _EPS,
            )
            for k, rate in zip(kinds, rates)
        )
        self.norm = nn.LayerNorm(C, eps=_EPS)
        self.num_features = self.head_hidden_size = C
        self.head = nn.Linear(C, num_classes) if num_classes else nn.Identity()
        self.feature_info = [{"num_chs": C, "reduction": patch_size, "module": f"layers.{i}"} for i in range(depth)]
        self.apply(init_linear)

    def _blocks(self, x: Tensor) -> tuple[list[Tensor], Tokens]:
        self.check_size(x, self.patch_embed.kernel_size[0])
        x = self.patch_embed(x)
        tokens = Tokens(grid=(x.shape[2], x.shape[3]), prefix=1)
        C = x.shape[1]
        pos = self.pos_embed.view(-1, C)
        if tokens.grid != self.grid:
            pos = resize(pos, 1, self.grid, tokens.grid, 0)
        x = torch.cat([self.cls_token.expand(x.shape[0], 1, C), x.flatten(2).mT], 1) + pos
        outputs = []
        for block in self.layers:
            x = self.run_block(block, x, tokens)
            outputs.append(x)
        return outputs, tokens

    def stage_outputs(self, x: Tensor) -> list[Tensor]:
        """[B, C, H/16, W/16] of every block, the class token left out."""
        outputs, tokens = self._blocks(x)
        return [tokens.to_grid(y) for y in outputs]

    def forward_features(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 1 + N, C], normed."""
        return self.norm(self._blocks(x)[0][-1])

    def pooled(self, x: Tensor) -> Tensor:
        """[B, 1 + N, C] -> [B, C]: the class token."""
        return x[:, 0]
