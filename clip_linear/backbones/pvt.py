"""The pyramid (PVT) of PolaFormer, FLatten and InLine.

Wang et al. 2021, arXiv 2102.12122, with the linear attention of Meng et al. 2025 (2501.15061), Han et al. 2023
(2308.00442) or Han et al. 2024 (2412.06590). There is no norm before the pooling; the released PolaFormer and FLatten
carry an unused one, which is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F

from clip_linear.attention import Tokens
from clip_linear.backbones.attention import Mlp, TokenAttention
from clip_linear.backbones.flags import expand_flags
from clip_linear.backbones.trunk import Trunk, drop_path_rates
from clip_linear.dress import Dress, Site
from clip_linear.errors import UserError
from clip_linear.registry import declaration


class Block(nn.Module):
    """Pre-norm: x += attention(LN(x)); x += mlp(LN(x))."""

    def __init__(self, attn: TokenAttention, hidden: int, drop_path: float, eps: float) -> None:
        super().__init__()
        C = attn.body.site.width
        self.norm1, self.attn = nn.LayerNorm(C, eps=eps), attn
        self.norm2, self.mlp = nn.LayerNorm(C, eps=eps), Mlp(C, hidden)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [B, N, C] -> [B, N, C]."""
        x = x + self.drop_path(self.attn(self.norm1(x), tokens))
        return x + self.drop_path(self.mlp(self.norm2(x), tokens))


class PatchEmbed(nn.Module):
    """A strided convolution without overlap, then LayerNorm (eps 1e-5); with a learned position of every token."""

    def __init__(self, cin: int, width: int, patch: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.proj, self.norm, self.grid = nn.Conv2d(cin, width, patch, patch), nn.LayerNorm(width), grid
        self.pos_embed = nn.Parameter(torch.zeros(grid[0] * grid[1] * width))  # flat: no weight decay
        nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Tokens]:
        """[B, C', H, W] -> tokens [B, N, C] with positions, and their grid; positions are interpolated bilinearly."""
        x = self.proj(x)
        tokens = Tokens(grid=(x.shape[2], x.shape[3]))
        pos = self.pos_embed.view(1, *self.grid, -1).permute(0, 3, 1, 2)
        if tokens.grid != self.grid:
            pos = F.interpolate(pos, size=tokens.grid, mode="bilinear")
        return self.norm(tokens.from_grid(x)) + pos.flatten(2).mT, tokens


class Stage(nn.Module):
    """A patch embedding and its blocks."""

    def __init__(self, patch_embed: PatchEmbed, blocks: list[Block]) -> None:
        super().__init__()
        self.patch_embed, self.blocks = patch_embed, nn.ModuleList(blocks)


class Pyramid(Trunk):
    """Four stages at strides 4, 8, 16, 32, mean pooling without a norm.

    ``dress`` (default: the variant's published one) is that of the linear blocks; softmax blocks have none.
    ``reductions`` are the spatial reductions of softmax blocks, ``linear_reductions`` those of linear blocks. Any image
    size, also not square: learned positions are interpolated. Raises UserError for arguments that do not fit.
    """

    def __init__(
        self,
        *,
        variant: str = "pola",
        flags: str | Sequence[Any] = "llll",
        dress: Dress | None = None,
        options: dict[str, Any] | None = None,
        embed_dims: Sequence[int] = (64, 128, 320, 512),
        depths: Sequence[int] = (2, 2, 2, 2),
        num_heads: Sequence[int] = (1, 2, 5, 8),
        mlp_ratios: Sequence[float] = (8, 8, 4, 4),
        reductions: Sequence[int] = (8, 4, 2, 1),
        linear_reductions: Sequence[int] = (1, 1, 1, 1),
        patch_size: int = 4,
        norm_eps: float = 1e-6,
        drop_path_rate: float = 0.0,
        num_classes: int = 1000,
        global_pool: str = "avg",
        img_size: int | tuple[int, int] = 224,
    ) -> None:
        super().__init__(num_classes, global_pool, img_size)
        kinds = expand_flags(flags, depths, variant)
        if dress is None:
            dress = declaration(variant).dress("paper" if declaration(variant).paper else "core", {})
        self.least = patch_size * 2 ** (len(depths) - 1)
        if min(self.img_size) < self.least:
            raise UserError(f"img_size {img_size} is too small; this model needs {self.least} pixels each way")
        rates = drop_path_rates(drop_path_rate, sum(depths))
        stages, cin, grid = [], 3, self.img_size
        for i, C in enumerate(embed_dims):
            patch = patch_size if i == 0 else 2
            grid = (grid[0] // patch, grid[1] // patch)
            blocks = []
            for kind in kinds[i]:
                linear = kind != "softmax"
                r = linear_reductions[i] if linear else reductions[i]
                keys = (grid[0] // r, grid[1] // r)
                site = Site(width=C, num_heads=num_heads[i], grid=keys, length=keys[0] * keys[1])
                attn = TokenAttention(kind, dress if linear else Dress(), site, r, options if kind == variant else None)
                blocks.append(Block(attn, int(mlp_ratios[i] * C), rates.pop(0), norm_eps))
            stages.append(Stage(PatchEmbed(cin, C, patch, grid), blocks))
            cin = C
        self.layers = nn.ModuleList(stages)
        self.num_features = self.head_hidden_size = embed_dims[-1]
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.feature_info = [
            {"num_chs": C, "reduction": patch_size * 2**i, "module": f"layers.{i}"} for i, C in enumerate(embed_dims)
        ]
        self.apply(init_linear)

    def stage_outputs(self, x: Tensor) -> list[Tensor]:
        """[B, C_i, H_i, W_i] of every stage."""
        self.check_size(x, self.least)
        outputs: list[Tensor] = []
        for stage in self.layers:
            y, tokens = stage.patch_embed(x)  # type: ignore[operator]
            for block in stage.blocks:  # type: ignore[union-attr]
                y = self.run_block(block, y, tokens)
            x = tokens.to_grid(y)
            outputs.append(x)
        return outputs

    def forward_features(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, C, H/32, W/32]."""
        return self.stage_outputs(x)[-1]

    def pooled(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C]."""
        return x.mean((2, 3))


def init_linear(module: nn.Module) -> None:
    """Linear layers as DeiT, PVT and Swin start: N(0, 0.02) truncated, zero bias."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
