"""Learned tables of a state dict fitted to a model built for another image size or window."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clip_linear.errors import UserError


def fit_state_dict(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A copy of ``state`` (our names) whose tables have the model's sizes.

    Positions of tokens (``pos_embed``, ``body.table``) and biases of relative positions (``bias_table``) are
    interpolated bicubically, grids that cannot be told are taken as square. Raises UserError where they are not.
    """
    own = dict(model.state_dict())
    out = {}
    for name, value in state.items():
        wanted = own.get(name)
        table = name.endswith(("pos_embed", "body.table", "bias_table"))
        if table and wanted is not None and wanted.numel() != value.numel():
            value = _resize(name, value, wanted.numel(), _channels(name, model), _grid(name, model))
        out[name] = value
    return out


def _module(name: str, model: nn.Module, up: int) -> nn.Module:
    return model.get_submodule(".".join(name.split(".")[:-up]))


def _channels(name: str, model: nn.Module) -> int:
    if name.endswith("bias_table"):
        return _module(name, model, 1).num_heads  # type: ignore[return-value]
    if name.endswith("body.table"):
        return _module(name, model, 1).site.width  # type: ignore[union-attr,return-value]
    holder = _module(name, model, 1) if "." in name else model
    return holder.norm.normalized_shape[0]  # type: ignore[union-attr,index,return-value]


def _grid(name: str, model: nn.Module) -> tuple[int, int, int]:
    """(prefix rows, height, width) of the model's own table."""
    if name.endswith("bias_table"):
        side = 2 * int(_module(name, model, 1).window) - 1  # type: ignore[arg-type]
        return 0, side, side
    if name.endswith("body.table"):
        site = _module(name, model, 1).site
        return site.prefix, *site.grid  # type: ignore[union-attr,return-value,misc]
    holder = _module(name, model, 1) if "." in name else model
    return (0 if "." in name else 1), *holder.grid  # type: ignore[return-value,misc]


def _resize(name: str, value: Tensor, size: int, channels: int, grid: tuple[int, int, int]) -> Tensor:
    prefix, height, width = grid
    rows = value.reshape(-1, channels)
    side = math.isqrt(len(rows) - prefix)
    if value.numel() % channels or side * side != len(rows) - prefix:
        raise UserError(
            f"{name} has {value.numel() // channels} rows, the model's has {size // channels}, and the former is not a "
            "square grid, so it cannot be resized; build the model at the checkpoint's image size"
        )
    return resize(rows, prefix, (side, side), (height, width)).flatten()


def resize(rows: Tensor, prefix: int, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Rows [prefix + H·W, C] of a table for another grid, bicubic; prefix rows stay."""
    grid = rows[prefix:].T.reshape(1, -1, *old)
    other = F.interpolate(grid.double(), size=new, mode="bicubic", align_corners=False).to(rows.dtype)
    return torch.cat([rows[:prefix], other[0].flatten(1).T])
