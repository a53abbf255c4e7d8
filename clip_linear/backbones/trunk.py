"""What timm and OpenCLIP expect of an image trunk, once for all backbones."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clip_linear.errors import UserError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, with which all six papers trained


class Trunk(nn.Module):
    """A subclass has ``stages(x)`` that yields (output of a stage, its grid), ``features(x)`` and ``pool(x)``."""

    head: nn.Module
    num_features: int  # width of the pooled feature
    chunk_names: tuple[str, ...] = ()  # prefixes of what precedes the first block

    def __init__(self, num_classes: int, global_pool: str, img_size: int | tuple[int, int]) -> None:
        super().__init__()
        self.num_classes, self.global_pool, self.grad_checkpointing = num_classes, global_pool, False
        self.img_size = (img_size, img_size) if isinstance(img_size, int) else (int(img_size[0]), int(img_size[1]))
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

    def run_block(self, block: nn.Module, *args: Any) -> Tensor:
        """A block, recomputed in the backward pass when checkpointing is on. Blocks hold no BatchNorm, so statistics
        are still updated once."""
        if self.grad_checkpointing and self.training:
            return checkpoint(block, *args, use_reentrant=False)  # type: ignore[return-value]
        return block(*args)

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
            self.img_size = (img_size, img_size) if isinstance(img_size, int) else (img_size[0], img_size[1])
            self.default_cfg = self.pretrained_cfg = self.default_cfg | {"input_size": (3, *self.img_size)}

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
        """timm's interface: (final features, [stage outputs, NCHW]) or the latter alone. Strides 4, 8, 16, 32 (DeiT: 16).

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
        """Parameter groups for layer-wise locking: the stem, then stages (coarse) or blocks."""
        blocks = r"^(?:layers|block)\.?(\d+)" if coarse else r"^(?:layers|block)\.?(\d+)(?:\.blocks)?\.(\d+)"
        return {
            "stem": r"^(?:patch_embed|cls_token|pos_embed)",
            "blocks": [(blocks, None), (r"^(?:proj|norm)", (99999,))],
        }


def drop_path_rates(rate: float, blocks: int) -> list[float]:
    """Stochastic depth: from 0 at the first block to ``rate`` at the last, over all blocks."""
    return [rate * i / max(1, blocks - 1) for i in range(blocks)]
