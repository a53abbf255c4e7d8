"""One attention body for every host: a variant's equation, and the dress that its paper puts round it.

A host (an OpenCLIP block, a timm block, a paper's backbone) owns the q/k/v and output projections and says what it
knows of its tokens (``Tokens``); the body does the rest in the order that all published modules share: core, local,
norm, gate.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clip_linear.dress import GATES, Dress, Site
from clip_linear.errors import UserError, unknown
from clip_linear.local import HiddenConv, make_local
from clip_linear.positions import resize
from clip_linear.registry import VariantInfo, check_options, own_parameters


@dataclass(frozen=True)
class Tokens:
    """All that a variant may know about its input; immutable."""

    grid: tuple[int, int] | None = None  # (H, W) of the image tokens; None: text
    prefix: int = 0  # CLS and registers: attend; no convolution; RoPE sin 0, cos 1
    index: Tensor | None = None  # [B, n] grid positions that PatchDropout kept, in its order
    causal: bool = False
    key_mask: Tensor | None = None  # [B, N], True = keep
    angles: torch.dtype = torch.float32  # in which rotary angles, made in float32, become sines and cosines

    def to_grid(self, x: Tensor) -> Tensor:
        """[B, N, C] -> [B, C, H, W]; prefix tokens left out, zeros where tokens were dropped."""
        assert self.grid is not None
        (height, width), x = self.grid, x[:, self.prefix :]
        if self.index is not None:
            full = x.new_zeros(x.shape[0], height * width, x.shape[-1])
            x = full.scatter(1, self.index[..., None].expand(-1, -1, x.shape[-1]), x)
        return x.mT.unflatten(-1, (height, width))

    def from_grid(self, y: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, N, C], the inverse of to_grid; prefix tokens get 0."""
        y = y.flatten(2).mT
        if self.index is not None:
            y = y.gather(1, self.index[..., None].expand(-1, -1, y.shape[-1]))
        return F.pad(y, (0, 0, self.prefix, 0))

    def positions(self) -> Tensor | None:
        """[B, 1, N], counted from 1 through prefix and grid, after PatchDropout; None: they are 1 … N in order."""
        if self.index is None:
            return None
        first = torch.arange(1, self.prefix + 1, device=self.index.device).expand(self.index.shape[0], -1)
        return torch.cat([first, self.index + 1 + self.prefix], 1)[:, None]

    def rope(self, head_dim: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(sin, cos) for rotary embeddings, each [N, D], or [B, 1, N, D] after PatchDropout; float32.

        Images: the first D/2 channels carry the row, the last D/2 the column, T = D/4 frequencies 10000^(−t/(T−1)) with
        the end point included, each repeated for a pair of channels. Text: one position, T = D/2 frequencies.
        The tables equal those of the released MALA, RALA and NaLaFormer code bit for bit only in this float32 form
        (a whole released backbone in float64 takes float64 sines of the float32 frequencies: ``angles``).
        """
        axes = 2 if self.grid is not None else 1
        if head_dim % (2 * axes):
            raise UserError(f"head_dim {head_dim} is not a multiple of {2 * axes}, which rotary embeddings need here")
        freq = 1.0 / (10000 ** torch.linspace(0, 1, head_dim // (2 * axes), device=device))
        freq = freq.repeat_interleave(2).to(self.angles)  # [D / axes]
        if self.grid is None:
            angle = torch.arange(length, device=device, dtype=self.angles)[:, None] * freq
            return angle.sin(), angle.cos()
        height, width = self.grid
        row = torch.arange(height, device=device, dtype=self.angles)[:, None] * freq
        column = torch.arange(width, device=device, dtype=self.angles)[:, None] * freq
        angle = torch.cat([row.repeat_interleave(width, 0), column.repeat(height, 1)], -1)  # [H·W, D]
        sin, cos = angle.sin(), angle.cos()
        if self.index is not None:
            sin, cos = sin[self.index][:, None], cos[self.index][:, None]
        return F.pad(sin, (0, 0, self.prefix, 0)), F.pad(cos, (0, 0, self.prefix, 0), value=1.0)


class Variant(nn.Module):
    """The mathematics of one attention. A subclass is one file; it owns only the equation's tensors.

    ``attention`` is the equation as a function; its keyword-only arguments beyond causal, key_mask and rope are the
    variant's options, which ``functional.attention`` and the ``options`` of a config accept by the same names.
    The parameters that ``info.tensors`` declares are made here: flat and zero, so that OpenCLIP's grouping rule keeps
    them out of weight decay; ``attend`` views them in the shapes of the options.
    """

    info: ClassVar[VariantInfo]
    core: ClassVar[Dress] = Dress()
    paper: ClassVar[Dress | None] = None

    def __init__(self, site: Site, **options: Any) -> None:
        super().__init__()
        check_options(self.info.name, type(self).option_names(), options)
        self.options = options
        for name, size in own_parameters(self.info, site).items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size)))

    @staticmethod
    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """q [B, H, N, D], k [B, H, M, D], v [B, H, M, E] -> [B, H, N, E]; key_mask [B, M] True = keep."""
        raise NotImplementedError

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, rope: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """The equation with this module's own tensors and options. Shapes as in ``attention``."""
        return self.attention(q, k, v, causal=tokens.causal, key_mask=tokens.key_mask, rope=rope, **self.options)

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """("core",) or ("core", "paper")."""
        return ("core",) if cls.paper is None else ("core", "paper")

    @classmethod
    @functools.cache
    def option_names(cls) -> tuple[str, ...]:
        """Names of the options of ``attention``."""
        return tuple(p for p in inspect.signature(cls.attention).parameters if p not in _COMMON)


_COMMON = ("q", "k", "v", "causal", "key_mask", "rope")


def rotate(x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
    """Rotary embedding of interleaved channel pairs: x cos + (−x₂, x₁, −x₄, x₃, …) sin, in float32 or wider."""
    if rope is None:
        return x
    x = wide(x)
    sin, cos = (t.to(x.dtype) for t in rope)
    swapped = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + swapped * sin


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, N, H·D] -> [B, H, N, D]; heads are the slow index."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, N, D] -> [B, N, H·D]."""
    return x.transpose(1, 2).flatten(2)


def wide(x: Tensor) -> Tensor:
    """x in float32, or float64 where it is: features, sums and normalisers are never computed in half precision."""
    return x if x.dtype == torch.float64 else x.float()


class AttentionBody(nn.Module):
    """Variant and dress: everything between a host's q, k, v and its output projection."""

    def __init__(self, variant: Variant, dress: Dress, site: Site) -> None:
        super().__init__()
        self.variant, self.dress, self.site = variant, dress, site
        self.local = make_local(dress.local, site)
        self.norm = nn.LayerNorm(site.width) if dress.norm else None
        self.gate = _make_gate(dress.gate, site.width)
        self.table = nn.Parameter(torch.zeros(site.length * site.width)) if dress.table else None
        if dress.mlp_conv and not site.mlp_width:
            raise UserError(
                "this host's MLP has no plain first layer to put a convolution behind; choose the core preset"
            )
        self.mlp_conv = HiddenConv(site) if dress.mlp_conv else None

    @property
    def needs_grid(self) -> bool:
        """Whether anything here must know where on the grid a token is."""
        dress = self.dress
        return bool(dress.rope or dress.local or dress.table or dress.mlp_conv or self.variant.info.needs_grid)

    def forward(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tokens: Tokens,
        keys: Tokens | None = None,
        local_v: Tensor | None = None,
    ) -> Tensor:
        """x: the host's normed input [B, N, C]; q, k, v [B, H, N, D]. Returns [B, N, C] before the out projection.

        A host whose keys are fewer than its queries gives their Tokens, and values [B, H, N, D] for the local term.
        """
        rope = tokens.rope(q.shape[-1], q.shape[-2], q.device) if self.dress.rope else None
        if self.table is not None:
            k = k + split_heads(self._positions(keys or tokens, k.shape[-2]).to(k.dtype), k.shape[1])
        o = merge_heads(self.variant.attend(q, k, v, tokens, rope))
        if self.local is not None:
            o = o + self.local(x, v if local_v is None else local_v, tokens)
        if self.norm is not None:
            o = F.layer_norm(
                wide(o), self.norm.normalized_shape, wide(self.norm.weight), wide(self.norm.bias), self.norm.eps
            ).to(o.dtype)
        if self.gate is not None:
            gate = self.gate(x)
            o = o * (F.silu(gate) if self.dress.gate == "silu" else gate)
        return o

    def _positions(self, tokens: Tokens, length: int) -> Tensor:
        """[1 or B, N, C] rows of the key positions for these tokens."""
        assert self.table is not None
        table = self.table.view(-1, self.site.width)
        if tokens.grid is None:
            return table[None, :length]
        if tokens.grid != self.site.grid:
            table = resize(table, tokens.prefix, self.site.grid, tokens.grid, length)
        positions = tokens.positions()
        return table[None] if positions is None else table[positions[:, 0] - 1]


def _make_gate(kind: str | None, width: int) -> nn.Linear | None:
    if kind is None:
        return None
    if kind not in GATES:
        raise unknown("gate", kind, GATES, f"use one of: {', '.join(GATES)}")
    gate = nn.Linear(width, width)
    if kind == "linear":  # as MALA, RALA and PolaFormer start; NaLaFormer's SiLU gate has torch's initial values
        nn.init.trunc_normal_(gate.weight, std=0.02)
        nn.init.zeros_(gate.bias)
    return gate
