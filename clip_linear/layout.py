"""What a tower knows of its tokens at run time, and how it learns which patches its patch dropout kept.

The kept positions reach the blocks beside the tensors. Gradient checkpointing runs a block again during the backward
pass, when another forward pass may have dropped other patches; so each block input remembers its own positions.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from open_clip.transformer import PatchDropout as OpenClipPatchDropout
from timm.layers.patch_dropout import PatchDropout as TimmPatchDropout
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from clip_linear.attention import Tokens
from clip_linear.errors import UserError


class Layout:
    """The geometry of one tower, shared by its blocks.

    ``source`` is the module whose ``grid_size`` is the grid (it changes with ``set_input_size``); None: text.
    """

    def __init__(self, source: Any = None, prefix: int = 0, causal: bool = False) -> None:
        self.source, self.prefix, self.causal = source, prefix, causal
        self.index: Tensor | None = None  # [B, n], of the forward pass that runs
        self._by_input = WeakTensorKeyDictionary()

    def tokens(self, length: int, needs_grid: bool) -> Tokens:
        """The Tokens of a call with so many tokens. Raises ValueError where the grid is needed and does not fit."""
        if self.source is None:
            return Tokens(causal=self.causal)
        height, width = self.source.grid_size
        if needs_grid and self.index is None and length != self.prefix + height * width:
            raise ValueError(
                f"{length} tokens are not {self.prefix} + {height}×{width}, the grid of this tower; "
                "build the model at the size of its images (force_image_size, set_input_size)"
            )
        return Tokens(grid=(int(height), int(width)), prefix=self.prefix, index=self.index, causal=self.causal)

    def enter(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        """A block begins with this input: remember its kept positions, or recall them in a recomputation."""
        if torch.compiler.is_compiling():
            return  # a compiled graph recomputes from the values that it traced
        if torch._C._current_graph_task_id() == -1:
            self._by_input[args[0]] = (self.index,)
        elif args[0] in self._by_input:
            (self.index,) = self._by_input[args[0]]
        else:
            raise RuntimeError(
                "gradient checkpointing runs a block again on an input that was never seen, so the patches that patch "
                "dropout kept are not known; use checkpoint(…, use_reentrant=False) or the core preset"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        twin = Layout(None, self.prefix, self.causal)
        memo[id(self)] = twin
        twin.source = copy.deepcopy(self.source, memo)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "prefix": self.prefix, "causal": self.causal}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class _Indexed(nn.Module):
    layout: Layout
    prob: float

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, C] -> [B, n, C]: what the class below would keep, drawn from the same random numbers."""
        if not self.training or self.prob == 0.0:
            self.layout.index = None
            return x
        ids = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)[..., None]
        ids = super().forward(ids)
        self.layout.index = ids[:, self.layout.prefix :, 0] - self.layout.prefix
        return x.gather(1, ids.expand(-1, -1, x.shape[-1]))


class IndexedOpenClipPatchDropout(_Indexed, OpenClipPatchDropout):
    """OpenCLIP's patch dropout that tells the layout what it kept."""


class IndexedTimmPatchDropout(_Indexed, TimmPatchDropout):
    """timm's patch dropout that tells the layout what it kept."""


_INDEXED = {OpenClipPatchDropout: IndexedOpenClipPatchDropout, TimmPatchDropout: IndexedTimmPatchDropout}


def follow_patch_dropout(tower: Any, layout: Layout, blocks: list[nn.Module]) -> None:
    """Make a tower's patch dropout, if it has one, tell its layout. Raises UserError for one of an unknown class."""
    dropout = getattr(tower, "patch_dropout", getattr(tower, "patch_drop", None))
    if dropout is None or isinstance(dropout, nn.Identity):
        return
    if type(dropout) not in _INDEXED or not getattr(dropout, "exclude_first_token", True):
        raise UserError(
            f"patch dropout {type(dropout).__name__} does not say which patches it keeps, which this preset needs; "
            "switch it off or use the core preset"
        )
    dropout.__class__ = _INDEXED[type(dropout)]
    dropout.layout = layout
    for block in blocks:
        block.register_forward_pre_hook(layout.enter)
