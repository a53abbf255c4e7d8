"""The conv-stem hierarchy of MAViT (MALA), RAVLT (RALA) and NaLaFormer: one skeleton, three dresses.

MAViT: Fan et al. 2025, arXiv 2507.00698; RAVLT: Fan et al. 2025, arXiv 2411.07635; NaLaFormer: arXiv 2506.21137. As
released, stages 3 and 4 use softmax (with the same dress); ``flags="llll"`` makes every block linear.
"""

from __future__ import annotations

import dataclasses
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
from clip_linear.dress import Site
from clip_linear.errors import UserError
from clip_linear.registry import declaration

_EPS = 1e-6  # of the blocks' LayerNorms


def _conv3(cin: int, cout: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(cin, cout, 3, stride, 1)


class Stem(nn.Module):
    """Four 3×3 convolutions with BatchNorm, strides 2, 1, 1, 2; GELU after the first three."""

    def __init__(self, width: int) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for cin, cout, stride in ((3, width // 2, 2), (width // 2, width // 2, 1), (width // 2, width // 2, 1)):
            parts += [_conv3(cin, cout, stride), nn.BatchNorm2d(cout), nn.GELU()]
        self.proj = nn.Sequential(*parts, _conv3(width // 2, width, 2), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, C, H/4, W/4], rounded up."""
        return self.proj(x)


class Downsample(nn.Module):
    """3×3 convolution of stride 2 and BatchNorm, no activation."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.reduction, self.norm = _conv3(width, out, 2), nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C', H/2, W/2], rounded up."""
        return self.norm(self.reduction(x))


class Block(nn.Module):
    """x += conv(x); x += γ₁ attention(LN(x)); (NaLaFormer: x += conv(x);) x += γ₂ mlp(LN(x))."""

    def __init__(
        self,
        attn: TokenAttention,
        hidden: int,
        drop_path: float,
        gamma: float | None,
        second_conv: bool,
    ) -> None:
        super().__init__()
        C = attn.body.site.width
        self.cpe1 = nn.Conv2d(C, C, 3, padding=1, groups=C)
        self.norm1, self.attn = nn.LayerNorm(C, eps=_EPS), attn
        self.cpe2 = nn.Conv2d(C, C, 3, padding=1, groups=C) if second_conv else None
        self.norm2, self.ffn = nn.LayerNorm(C, eps=_EPS), Mlp(C, hidden, conv=True)
        self.drop_path = DropPath(drop_path)
        self.gamma_1 = self.gamma_2 = None
        if gamma is not None:  # 1-D, so that weight decay leaves LayerScale alone
            self.gamma_1, self.gamma_2 = (nn.Parameter(torch.full((C,), float(gamma))) for _ in range(2))

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [B, N, C] -> [B, N, C]."""
        x = x + tokens.from_grid(self.cpe1(tokens.to_grid(x)))
        x = x + self.drop_path(_scaled(self.attn(self.norm1(x), tokens), self.gamma_1))
        if self.cpe2 is not None:
            x = x + tokens.from_grid(self.cpe2(tokens.to_grid(x)))
        return x + self.drop_path(_scaled(self.ffn(self.norm2(x), tokens), self.gamma_2))


def _scaled(x: Tensor, gamma: Tensor | None) -> Tensor:
    return x if gamma is None else x * gamma.to(x.dtype)


class Stage(nn.Module):
    """Blocks, and the down-sampling to the next stage."""

    def __init__(self, blocks: list[Block], downsample: Downsample | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.downsample = downsample


class Hierarchy(Trunk):
    """Four stages at strides 4, 8, 16, 32 on any image size.

    ``variant`` fills the linear blocks; ``flags`` (see expand_flags) say which blocks they are. Features are projected
    (1×1, BatchNorm, SiLU) to ``projection`` channels and then pooled. Raises UserError for arguments that do not fit.
    """

    def __init__(
        self,
        *,
        variant: str = "mala",
        flags: str | Sequence[Any] = "llvv",
        nala: bool = False,
        embed_dims: Sequence[int],
        depths: Sequence[int],
        num_heads: Sequence[int],
        mlp_ratios: Sequence[float],
        projection: int,
        layer_scale: Sequence[float | None] = (1, 1, 1, 1),
        drop_path_rate: float = 0.0,
        num_classes: int = 1000,
        global_pool: str = "avg",
        img_size: int | tuple[int, int] = 224,
    ) -> None:
        super().__init__(num_classes, global_pool, img_size)
        kinds = expand_flags(flags, depths, variant)
        dress = declaration("nala" if nala else "mala").dress("paper", {})
        rates = drop_path_rates(drop_path_rate, sum(depths))
        self.patch_embed, layers = Stem(embed_dims[0]), []
        for i, (C, H) in enumerate(zip(embed_dims, num_heads)):
            if C % H or (C // H) % 4:
                raise UserError(f"stage {i + 1}: head_dim {C}/{H} must be a multiple of 4 (2-D rotary embeddings)")
            side = tuple(-(-s // 2 ** (i + 2)) for s in self.img_size)
            site = Site(width=C, num_heads=H, grid=(side[0], side[1]), length=side[0] * side[1])
            blocks = [
                Block(TokenAttention(k, dress, site), int(mlp_ratios[i] * C), rates.pop(0), layer_scale[i], nala)
                for k in kinds[i]
            ]
            layers.append(Stage(blocks, Downsample(C, embed_dims[i + 1]) if i + 1 < len(depths) else None))
        self.layers = nn.ModuleList(layers)
        self.proj, self.norm = nn.Linear(embed_dims[-1], projection), nn.BatchNorm2d(projection)
        self.num_features = self.head_hidden_size = projection
        self.head = nn.Linear(projection, num_classes) if num_classes else nn.Identity()
        self.feature_info = [
            {"num_chs": C, "reduction": 2 ** (i + 2), "module": f"layers.{i}"} for i, C in enumerate(embed_dims)
        ]
        self.apply(_init_nala if nala else _init)

    def set_input_size(self, img_size: int | tuple[int, int] | None = None, **unused: Any) -> None:
        """Any size works without this; it tells the blocks which grid to expect, for profiles."""
        super().set_input_size(img_size)
        for i, stage in enumerate(self.layers):
            grid = (-(-self.img_size[0] // 2 ** (i + 2)), -(-self.img_size[1] // 2 ** (i + 2)))
            for block in stage.blocks:  # type: ignore[union-attr]
                body = block.attn.body
                body.site = dataclasses.replace(body.site, grid=grid, length=grid[0] * grid[1])

    def stage_outputs(self, x: Tensor) -> list[Tensor]:
        """[B, C_i, H_i, W_i] of every stage, before down-sampling."""
        outputs, x = [], self.patch_embed(x)
        for stage in self.layers:
            angles = torch.float64 if x.dtype == torch.float64 else torch.float32
            tokens = Tokens(grid=(x.shape[2], x.shape[3]), angles=angles)
            y = tokens.from_grid(x)
            for block in stage.blocks:  # type: ignore[union-attr]
                y = self.run_block(block, y, tokens)
            outputs.append(tokens.to_grid(y))
            x = stage.downsample(outputs[-1]) if stage.downsample is not None else x  # type: ignore[operator]
        return outputs

    def forward_features(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, projection, H/32, W/32], after BatchNorm and SiLU."""
        x = self.stage_outputs(x)[-1]
        x = self.proj(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return F.silu(self.norm(x))

    def pooled(self, x: Tensor) -> Tensor:
        """[B, projection, H, W] -> [B, projection]."""
        return x.mean((2, 3))


def _init(module: nn.Module) -> None:
    # The released codes' layers are all convolutions here: N(0, 0.02) truncated, zero bias.
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _init_nala(module: nn.Module) -> None:
    # NaLaFormer re-initialises convolutions only; its linear layers keep torch's values.
    if isinstance(module, nn.Conv2d):
        _init(module)
