"""Weights of the papers' released attention modules in our modules."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from clip_linear.attention import AttentionBody, Tokens, split_heads
from clip_linear.dress import Site
from clip_linear.errors import UserError
from clip_linear.registry import declaration, variant_class

# Released name -> ours; what is not here is split below or has our name already.
_RENAMED = {
    "out_proj": "proj",
    "lepe": "body.local",
    "dwc": "body.local",
    "ln": "body.norm",
    "residual": "body.local.net",
    "power": "body.variant.power",
    "scale": "body.variant.scale",
    "positional_encoding": "body.table",
}
# Fused projections -> the parts they hold, each as wide as the module.
_FUSED = {"qkvo": "qkvg", "qkvg": "qkvg", "qkv": "qkv", "qg": "qg", "q": "q", "kv": "kv"}

UNKNOWN = (0, 0)  # the grid of a released module, which its weights do not tell


class OfficialAttention(nn.Module):
    """A body between its own q/k/v and output projections: the released modules on tokens [B, N, C]."""

    def __init__(self, body: AttentionBody, bias: bool = True) -> None:
        super().__init__()
        width = body.site.width
        self.qkv, self.body, self.proj = nn.Linear(width, 3 * width, bias=bias), body, nn.Linear(width, width)

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None, num_prefix_tokens: int = 0) -> Tensor:
        """x [B, N, C], prefix tokens first, then the grid row by row -> [B, N, C]. grid None: text, causal.

        Key positions belong to the first grid that they fit; for another they are interpolated.
        """
        site = self.body.site
        if grid is not None and site.grid == UNKNOWN and site.length == num_prefix_tokens + grid[0] * grid[1]:
            self.body.site = dataclasses.replace(site, grid=grid, prefix=num_prefix_tokens)
        tokens = Tokens(grid=grid, prefix=num_prefix_tokens, causal=grid is None)
        heads = (split_heads(t, self.body.site.num_heads) for t in self.qkv(x).chunk(3, -1))
        return self.proj(self.body(x, *heads, tokens))


def load_official(variant: str, state_dict: dict[str, Tensor], num_heads: int, **options: Any) -> OfficialAttention:
    """Our module with the weights of a paper's released one, for layouts of MALA, RALA, NaLaFormer, PolaFormer (PVT and
    Swin), FLatten and InLine.

    ``options`` are the variant's (``kernel="relu"`` for InLine). Call it as ``module(x, grid=(H, W),
    num_prefix_tokens=0)`` on tokens [B, N, C]. Raises UserError for a variant without a published module and for
    weights that do not fit.
    """
    dress = declaration(variant).dress("paper", {})
    renamed = rename_module(state_dict)
    width = renamed["proj.weight"].shape[0]
    rows = renamed["body.table"].numel() // width if "body.table" in renamed else 0
    site = Site(width=width, num_heads=num_heads, length=rows, grid=UNKNOWN)
    body = AttentionBody(variant_class(variant)(site, **options), dress, site)
    module = OfficialAttention(body, bias="qkv.bias" in renamed)
    try:
        module.load_state_dict(renamed)
    except RuntimeError as error:
        raise UserError(f"these are not the weights of a released {variant} module: {error}") from error
    return module


def rename_module(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """A released module's weights under the names of ours; fused projections are split. Raises UserError."""
    weights = {name: _as_linear(name, tensor) for name, tensor in state_dict.items()}
    projection = weights.get("proj.weight", weights.get("out_proj.weight"))
    if projection is None:
        raise UserError(f"these weights have no output projection; found: {', '.join(sorted(weights)) or 'nothing'}")
    return _rename(weights, projection.shape[0])


def _as_linear(name: str, tensor: Tensor) -> Tensor:
    # MALA and RALA project by 1×1 convolutions [O, I, 1, 1].
    part = name.split(".")[0]
    return tensor.flatten(1) if tensor.ndim == 4 and part in (*_FUSED, "proj", "out_proj") else tensor


def _rename(weights: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    parts: dict[tuple[str, str], Tensor] = {}
    for name, tensor in weights.items():
        head, _, rest = name.partition(".")
        if head in _FUSED:
            if tensor.shape[0] != width * len(_FUSED[head]):
                raise UserError(f"{name} has {tensor.shape[0]} rows, expected {len(_FUSED[head])} × {width}")
            parts.update({(letter, rest): t for letter, t in zip(_FUSED[head], tensor.split(width))})
        elif head in ("power", "scale", "positional_encoding"):
            out[_RENAMED[head]] = tensor.flatten()
        else:
            out[".".join(p for p in (_RENAMED.get(head, head), rest) if p)] = tensor
    for kind in {kind for _, kind in parts}:
        if all((letter, kind) in parts for letter in "qkv"):
            out[f"qkv.{kind}"] = torch.cat([parts[letter, kind] for letter in "qkv"])
        if ("g", kind) in parts:
            out[f"body.gate.{kind}"] = parts["g", kind]
    return out
