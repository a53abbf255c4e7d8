"""Learned positional encodings of the keys: one row per token, interpolated where the grid is another."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from clip_linear.dress import Site
from clip_linear.errors import UserError


def resize(table: Tensor, prefix: int, old: tuple[int, int] | None, new: tuple[int, int] | None, rows: int) -> Tensor:
    """Rows [N, C] for another grid, bicubic as OpenCLIP resizes positional embeddings; text: linear, to ``rows`` rows.

    Prefix rows stay as they are.
    """
    if old is None or new is None:
        return F.interpolate(table.mT[None].float(), size=rows, mode="linear")[0].mT.to(table.dtype)
    grid = table[prefix:].mT.unflatten(-1, old)[None].float()  # [1, C, H, W]
    grid = F.interpolate(grid, size=new, mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([table[:prefix], grid[0].flatten(1).mT.to(table.dtype)])


def resize_loaded(flat: Tensor, site: Site) -> Tensor:
    """A checkpoint's flat table for this site. Raises UserError where its grid cannot be told (it is not square)."""
    table = flat.view(-1, site.width)
    if site.grid is None:
        return resize(table, 0, None, None, site.length).flatten()
    side = math.isqrt(table.shape[0] - site.prefix)
    if side * side != table.shape[0] - site.prefix:
        raise UserError(
            f"the checkpoint's key positions have {table.shape[0]} rows, this model's {site.length}, and "
            f"{table.shape[0] - site.prefix} is not a square grid; build the model at the checkpoint's image size"
        )
    return resize(table, site.prefix, (side, side), site.grid, site.length).flatten()
