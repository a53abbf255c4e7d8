"""What timm and OpenCLIP expect of an image trunk, once for all backbones."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clip_linear.errors import UserError
from clip_linear.marker import SIZE, decode

BLOCKS = "clip_linear_blocks"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, with which all six papers trained


class Trunk(nn.Module):
    """A subclass has ``layers`` (stages with ``blocks``, or blocks) and the methods that raise here.

    A small buffer in the state dict says which variant each block has: the weights of an all-linear and of a released
    MAViT have the same names and shapes, and would load into each other without a word.
    """

    head: nn.Module
    layers: nn.ModuleList
    num_features: int  # width of the pooled feature

    def __init__(self, num_classes: int, global_pool: str, img_size: int | tuple[int, int]) -> None:
        super().__init__()
        self.num_classes, self.global_pool, self.grad_checkpointing = num_classes, global_pool, False
        self.img_size = as_pair(img_size)
        self.default_cfg: dict[str, Any] = {
            "input_size": (3, *self.img_size),
            "pool_size": tuple(-(-side // 32) for side in self.img_size),
            "num_classes": num_classes,
            "mean": MEAN,
            "std": STD,
            "interpolation": "bicubic",
            "crop_pct": 0.9,
            "classifier": "head",
        }
        self.pretrained_cfg = self.default_cfg
        self.register_buffer(BLOCKS, torch.zeros(SIZE, dtype=torch.uint8))
        self.register_state_dict_post_hook(_write_variants)
        self.register_load_state_dict_pre_hook(_check_variants)

    def blocks(self) -> list[Any]:
        """All blocks in order."""
        return [block for stage in self.layers for block in getattr(stage, "blocks", [stage])]

    def block_variants(self) -> list[str]:
        """The variant of every block; in windowed models softmax with relative positions is ``softmax`` too."""
        return [b.attn.body.variant.info.name if hasattr(b.attn, "body") else "softmax" for b in self.blocks()]

    def run_block(self, block: nn.Module, *args: Any) -> Tensor:
        """A block, recomputed in the backward pass when checkpointing is on. Blocks hold no BatchNorm, so statistics
        are still updated once."""
        if self.grad_checkpointing and self.training:
            return checkpoint(block, *args, use_reentrant=False)  # type: ignore[return-value]
        return block(*args)

    def check_size(self, x: Tensor, least: int) -> None:
        """Raises UserError for images [B, 3, H, W] that are smaller than the coarsest patch."""
        if min(x.shape[-2:]) < least:
            raise UserError(
                f"images of {x.shape[-2]}×{x.shape[-1]} are too small for this model; it needs {least} pixels each way"
            )

    def get_classifier(self) -> nn.Module:
        """The classifier, Identity without classes."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier; 0 classes: the pooled feature comes out; global_pool "": unpooled features."""
        if global_pool is not None:
            if global_pool not in ("avg", "", "token"):
                raise UserError(f"global_pool {global_pool!r} is not one of 'avg', 'token', ''")
            self.global_pool = global_pool
        self.num_classes = num_classes
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass."""
        self.grad_checkpointing = enable

    def set_input_size(self, img_size: int | tuple[int, int] | None = None, **unused: Any) -> None:
        """Prepare for another image size (H, W); backbones with tables resize them."""
        if img_size is not None:
            self.img_size = as_pair(img_size)
            pool_size = self.default_cfg["pool_size"] and tuple(-(-side // 32) for side in self.img_size)
            self.default_cfg |= {"input_size": (3, *self.img_size), "pool_size": pool_size}
            self.pretrained_cfg = self.default_cfg

    def no_weight_decay(self) -> set[str]:
        """Parameters that no optimizer should decay; they are 1-D, so OpenCLIP's grouping rule agrees."""
        return {name for name, p in self.named_parameters() if p.ndim < 2}

    def forward_features(self, x: Tensor) -> Tensor:
        """x [B, 3, H, W] -> unpooled features."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Unpooled features -> [B, num_features] (``pre_logits``, or without classes) or [B, num_classes]."""
        if self.global_pool:
            x = self.pooled(x)
        return x if pre_logits else self.head(x)

    def pooled(self, x: Tensor) -> Tensor:
        """Unpooled features -> [B, num_features]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 3, H, W] -> [B, num_classes], or the pooled feature without classes."""
        return self.forward_head(self.forward_features(x))

    def stage_outputs(self, x: Tensor) -> list[Tensor]:
        """The output of every stage, before down-sampling, [B, C_i, H_i, W_i]."""
        raise NotImplementedError

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """timm's interface: (final features, [stage outputs, NCHW]) or the latter; strides 4, 8, 16, 32 (DeiT: 16).

        ``indices`` chooses stages: None all, n the last n, or a list. Raises UserError for another format.
        """
        if output_fmt != "NCHW":
            raise UserError(f"output_fmt {output_fmt!r} is not supported; use 'NCHW'")
        maps = self.stage_outputs(x)
        if isinstance(indices, int):
            maps = maps[-indices:]
        elif indices is not None:
            maps = [maps[i] for i in indices]
        return maps if intermediates_only else (self.forward_features(x), maps)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameter groups for layer-wise locking: the stem, then stages (coarse) or blocks, then what follows them."""
        blocks: list[tuple[str, Any]] = [(r"^layers\.(\d+)", None)]
        if not coarse:
            inside = [(r"^layers\.(\d+)\.patch_embed", (-1,)), (r"^layers\.(\d+)\.downsample", (99998,))]
            blocks = [*inside, (r"^layers\.(\d+)\.blocks\.(\d+)", None), *blocks]
        return {
            "stem": r"^(?:patch_embed|cls_token|pos_embed|layers\.0\.patch_embed)",
            "blocks": [*blocks, (r"^(?:proj|norm)", (99999,))],
        }


def drop_path_rates(rate: float, blocks: int) -> list[float]:
    """Stochastic depth: from 0 at the first block to ``rate`` at the last, over all blocks."""
    return [rate * i / max(1, blocks - 1) for i in range(blocks)]


def as_pair(size: int | Sequence[int]) -> tuple[int, int]:
    """(height, width). Raises UserError for anything but a positive number or two."""
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise UserError(f"image size {size!r} is neither a number of pixels nor two of them (height, width)")
    return pair[0], pair[1]


def encode_variants(names: list[str]) -> Tensor:
    """Variants of all blocks as uint8 [256]: ``mala*8 softmax*4``, or its hash where that is longer."""
    text = " ".join(f"{name}*{len(list(group))}" for name, group in itertools.groupby(names))
    if len(text) > SIZE:
        text = f"sha256 {hashlib.sha256(text.encode()).hexdigest()}"
    return torch.tensor(list(text.encode().ljust(SIZE)), dtype=torch.uint8)


def _write_variants(module: Any, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    # Made anew each time: averaging, swaps and the meta device leave other values in the buffer.
    key = prefix + BLOCKS
    if key in state:
        state[key] = encode_variants(module.block_variants()).to(state[key].device)


def _check_variants(module: Any, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    key, own = prefix + BLOCKS, encode_variants(module.block_variants())
    if key not in state:
        state[key] = own
    elif not torch.equal(state[key].cpu().flatten(), own):
        raise UserError(
            f"the checkpoint's blocks are {decode(state[key])}, this model's {decode(own)}; build the model by the "
            "name and flags it was trained with"
        )
