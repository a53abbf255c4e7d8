"""The window transformer (Swin) of PolaFormer, FLatten and InLine. Liu et al. 2021, arXiv 2103.14030.

A linear block's window is large (56: the whole grid at 224 px), a softmax block's 7 (12 for windows above 56; InLine:
an eighth of the linear one). Odd blocks shift by half a window where the grid is larger than the window; linear blocks
shift too but cannot mask, so that tokens mix across the rolled border, as in the released codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F

from clip_linear.attention import Tokens, merge_heads, split_heads
from clip_linear.backbones.attention import Mlp, TokenAttention
from clip_linear.backbones.flags import expand_flags, window_places
from clip_linear.backbones.pvt import init_linear
from clip_linear.backbones.resizing import resize
from clip_linear.backbones.trunk import Trunk, as_pair, drop_path_rates
from clip_linear.dress import Dress, Site
from clip_linear.errors import UserError
from clip_linear.registry import declaration, variant_class


class WindowSoftmax(nn.Module):
    """Softmax with a learned bias for every relative position in a window, and −100 across a rolled border."""

    def __init__(self, width: int, num_heads: int, window: int) -> None:
        super().__init__()
        self.num_heads, self.window = num_heads, window
        self.softmax: Callable[..., Tensor] = variant_class("softmax").attention
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2 * num_heads))  # flat: no weight decay
        nn.init.trunc_normal_(self.bias_table, std=0.02)

    def bias(self) -> Tensor:
        """[1, H, w², w²]."""
        w, device = self.window, self.bias_table.device
        at = torch.stack(torch.meshgrid(torch.arange(w), torch.arange(w), indexing="ij")).flatten(1).to(device)
        offset = (at[:, :, None] - at[:, None, :]) + w - 1  # [2, w², w²]
        index = offset[0] * (2 * w - 1) + offset[1]
        return self.bias_table.view(-1, self.num_heads)[index].permute(2, 0, 1)[None]

    def resize_window(self, window: int) -> None:
        """Another window: the table is interpolated."""
        if window != self.window:
            rows = self.bias_table.data.view(-1, self.num_heads)
            old, new = (2 * self.window - 1,) * 2, (2 * window - 1,) * 2
            self.bias_table = nn.Parameter(resize(rows, 0, old, new).flatten())
            self.window = window

    def forward(self, x: Tensor, border: Tensor | None) -> Tensor:
        """x [B·nW, w², C]; border [nW, w², w²] or None -> [B·nW, w², C]."""
        q, k, v = (split_heads(t, self.num_heads) for t in self.qkv(x).chunk(3, -1))
        bias = self.bias()
        if border is not None:
            bias = (bias + border[:, None]).repeat(x.shape[0] // border.shape[0], 1, 1, 1)
        return self.proj(merge_heads(self.softmax(q, k, v, bias=bias)))


class Block(nn.Module):
    """Windows, attention in each, windows back; then the MLP."""

    def __init__(
        self, attn: TokenAttention | WindowSoftmax, width: int, hidden: int, window: int, shift: int, drop_path: float
    ) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), attn
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width, hidden)
        self.window, self.shift, self.drop_path = window, shift, DropPath(drop_path)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [B, N, C] -> [B, N, C]."""
        assert tokens.grid is not None
        (H, W), w, s = tokens.grid, self.window, self.shift
        if H % w or W % w:
            raise UserError(f"a grid of {H}×{W} tokens is not a multiple of the window {w}; choose another window_size")
        y = self.norm1(x).unflatten(1, (H, W))
        if s:
            y = torch.roll(y, (-s, -s), (1, 2))
        y = windows(y, w)  # [B·nW, w², C]
        if isinstance(self.attn, WindowSoftmax):
            y = self.attn(y, border_mask(H, W, w, s, x) if s else None)
        else:
            y = self.attn(y, Tokens(grid=(w, w)))
        y = unwindows(y, w, H, W)
        if s:
            y = torch.roll(y, (s, s), (1, 2))
        x = x + self.drop_path(y.flatten(1, 2))
        return x + self.drop_path(self.mlp(self.norm2(x), tokens))


def windows(x: Tensor, w: int) -> Tensor:
    """[B, H, W, C] -> [B·nW, w², C]."""
    B, H, W, C = x.shape
    return x.view(B, H // w, w, W // w, w, C).transpose(2, 3).reshape(-1, w * w, C)


def unwindows(y: Tensor, w: int, H: int, W: int) -> Tensor:
    """[B·nW, w², C] -> [B, H, W, C]."""
    return y.view(-1, H // w, W // w, w, w, y.shape[-1]).transpose(2, 3).reshape(-1, H, W, y.shape[-1])


def border_mask(H: int, W: int, w: int, s: int, like: Tensor) -> Tensor:
    """[nW, w², w²]: −100 between tokens that were not neighbours before the roll by s, else 0."""

    def regions(size: int) -> Tensor:
        at = torch.arange(size, device=like.device)
        return (at >= size - w).long() + (at >= size - s).long()

    region = windows((regions(H)[:, None] * 3 + regions(W))[None, :, :, None], w)[..., 0]  # [nW, w²]
    return (region[:, None, :] != region[:, :, None]).to(like.dtype) * -100


class PatchMerging(nn.Module):
    """2×2 neighbours side by side, LayerNorm, linear to twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, W, C] -> [B, H/2, W/2, 2C]."""
        parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.reduction(self.norm(torch.cat(parts, -1)))


class Stage(nn.Module):
    """Blocks, and the merging before the next stage."""

    def __init__(self, blocks: list[Block], downsample: PatchMerging | None) -> None:
        super().__init__()
        self.blocks, self.downsample = nn.ModuleList(blocks), downsample


class Windowed(Trunk):
    """Four stages at strides 4, 8, 16, 32; LayerNorm, then the mean.

    ``dress`` (default: the variant's published one) is that of the linear blocks. ``softmax_window`` None: 7, or 12
    when window_size > 56. Windows are fixed when the model is built: other image sizes by ``img_size`` or
    set_input_size. Raises UserError when a window does not divide its grid.
    """

    def __init__(
        self,
        *,
        variant: str = "pola",
        flags: str | Sequence[Any] = "llss",
        dress: Dress | None = None,
        options: dict[str, Any] | None = None,
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        mlp_ratio: float = 4.0,
        window_size: int = 56,
        softmax_window: int | None = None,
        patch_size: int = 4,
        drop_path_rate: float = 0.0,
        num_classes: int = 1000,
        global_pool: str = "avg",
        img_size: int | tuple[int, int] = 224,
    ) -> None:
        super().__init__(num_classes, global_pool, img_size)
        kinds = expand_flags(flags, depths, variant)
        if dress is None:
            dress = declaration(variant).dress("paper" if declaration(variant).paper else "core", {})
        self.patch_size, self.window_size, self.softmax_window = patch_size, window_size, softmax_window
        self._kinds = kinds
        places = iter(window_places(kinds, self.img_size, patch_size, window_size, softmax_window))
        rates = drop_path_rates(drop_path_rate, sum(depths))
        self.patch_embed = nn.ModuleDict(
            {"proj": nn.Conv2d(3, embed_dim, patch_size, patch_size), "norm": nn.LayerNorm(embed_dim)}
        )
        stages = []
        for i, kinds_i in enumerate(kinds):
            C, H = embed_dim * 2**i, num_heads[i]
            blocks = []
            for kind in kinds_i:
                w, shift = next(places)
                site = Site(width=C, num_heads=H, grid=(w, w), length=w * w)
                attn = (
                    WindowSoftmax(C, H, w)
                    if kind == "softmax"
                    else TokenAttention(kind, dress, site, 1, options if kind == variant else None)
                )
                blocks.append(Block(attn, C, int(mlp_ratio * C), w, shift, rates.pop(0)))
            stages.append(Stage(blocks, PatchMerging(C) if i + 1 < len(depths) else None))
        self.layers = nn.ModuleList(stages)
        self.num_features = self.head_hidden_size = embed_dim * 2 ** (len(depths) - 1)
        self.norm = nn.LayerNorm(self.num_features)
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.feature_info = [
            {"num_chs": embed_dim * 2**i, "reduction": patch_size * 2**i, "module": f"layers.{i}"}
            for i in range(len(depths))
        ]
        self.apply(init_linear)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, window_size: int | None = None, **unused: Any
    ) -> None:
        """Windows and tables for another image size; all weights stay, tables are interpolated.

        Linear blocks that saw the whole grid still do, unless ``window_size`` is given; the window of softmax blocks is
        as at construction or, where that does not fit, as it is now. Raises UserError if none fits.
        """
        if img_size is None:
            return
        size = as_pair(img_size)
        if window_size is None:
            whole = self.window_size >= min(self.img_size) // self.patch_size
            window_size = min(size) // self.patch_size if whole else self.window_size
        try:
            places = window_places(self._kinds, size, self.patch_size, window_size, self.softmax_window)
        except UserError:
            now = [b.window for b in self.blocks() if isinstance(b.attn, WindowSoftmax)]
            if not now:
                raise
            places = window_places(self._kinds, size, self.patch_size, window_size, max(now))
        for block, (w, shift) in zip(self.blocks(), places):
            block.attn.resize_window(w)  # type: ignore[union-attr,operator]
            block.window, block.shift = w, shift
        self.window_size = window_size
        super().set_input_size(size)

    def stage_outputs(self, x: Tensor) -> list[Tensor]:
        """[B, C_i, H_i, W_i] of every stage, before merging."""
        if tuple(x.shape[-2:]) != self.img_size:
            raise UserError(
                f"this model was built for images of {self.img_size[0]}×{self.img_size[1]}, not "
                f"{x.shape[-2]}×{x.shape[-1]}; build it with img_size=…, or call set_input_size"
            )
        x = self.patch_embed["proj"](x)
        y, outputs = self.patch_embed["norm"](x.permute(0, 2, 3, 1)), []  # [B, H, W, C]
        for stage in self.layers:
            tokens, z = Tokens(grid=(y.shape[1], y.shape[2])), y.flatten(1, 2)
            for block in stage.blocks:  # type: ignore[union-attr]
                z = self.run_block(block, z, tokens)
            outputs.append(tokens.to_grid(z))
            if stage.downsample is not None:
                y = stage.downsample(outputs[-1].permute(0, 2, 3, 1))  # type: ignore[operator]
        return outputs

    def forward_features(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, C, H/32, W/32], normed."""
        x = self.stage_outputs(x)[-1].permute(0, 2, 3, 1)
        return F.layer_norm(x, self.norm.normalized_shape, self.norm.weight, self.norm.bias, self.norm.eps).permute(
            0, 3, 1, 2
        )

    def pooled(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C]."""
        return x.mean((2, 3))
