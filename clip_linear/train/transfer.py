"""Attention transfer: swapped attention learns to give what softmax gave, each layer by itself.

The first stage of LoLCATs (Zhang et al. 2024, arXiv 2410.10254), there for the feature maps of language models, here
for whole attention layers (projections and variant) of both towers of a CLIP model. Every layer is given the softmax
model's own input, so that no layer learns from another's mistakes, and the model goes on with the softmax output.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from clip_linear.errors import UserError
from clip_linear.hosts import Host
from clip_linear.names import KEY


class AttentionTransfer:
    """The loss of attention transfer, by hooks on both models; everything but the swapped layers is frozen.

    For each tower the mean over its swapped layers and the batch of Σ(o − t)² / Σt², summed over tokens and channels,
    with o the layer's output [B, N, C] and t the softmax layer's (relative, so that layers of unlike scale count alike:
    ours; LoLCATs takes the plain mean square).
    A convolution that a dress puts into the MLP is no part of the attention's output and stays as it is.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        layers = {name: module for name, module in student.named_modules() if isinstance(module, Host)}
        if not layers:
            raise UserError(
                "--attention-transfer: no attention of OpenCLIP's or timm's is swapped here; give --model NAME+VARIANT"
            )
        self.teacher = teacher.eval().requires_grad_(False)
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}  # layer -> softmax's input and output
        self._errors: dict[str, list[Tensor]] = {}
        self._active = False
        student.requires_grad_(False)
        for name, layer in layers.items():
            assert isinstance(layer, nn.Module)
            layer.requires_grad_(True)
            if layer.body.mlp_conv is not None:
                layer.body.mlp_conv.requires_grad_(False)
            teacher.get_submodule(name).register_forward_hook(self._keep(name))
            layer.register_forward_pre_hook(self._give(name), with_kwargs=True)
            layer.register_forward_hook(self._compare(name))

    def __call__(self, model: nn.Module, images: Tensor, texts: Tensor) -> dict[str, Tensor]:
        """images [B, 3, H, W], texts [B, L] -> {"image_attention_loss", "text_attention_loss"}, of swapped towers."""
        try:
            with torch.no_grad():
                self.teacher(images, texts)
            self._active, self._errors = True, {}
            model(images, texts)
        finally:
            self._active = False
            self._kept.clear()
        return {f"{tower}_attention_loss": torch.stack(errors).mean() for tower, errors in self._errors.items()}

    def _keep(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._kept[name] = (args[0], output[0] if isinstance(output, tuple) else output)

        return hook

    def _give(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self._active:
                return None
            own, given = args[0], self._kept[name][0]  # query, key and value are one tensor
            args = tuple(given if a is own else a for a in args)
            return args, {k: given if v is own else v for k, v in kwargs.items()}

        return hook

    def _compare(self, name: str) -> Any:
        tower = "image" if name.startswith("visual.") else "text"

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if not self._active:
                return None
            ours, target = output[0] if isinstance(output, tuple) else output, self._kept[name][1]
            target32 = target.float()
            error = (ours.float() - target32).square().sum((1, 2)) / target32.square().sum((1, 2))
            self._errors.setdefault(tower, []).append(error.mean())
            return (target, *output[1:]) if isinstance(output, tuple) else target

        return hook


def without_swap(model_cfg: dict[str, Any]) -> dict[str, Any]:
    """The config of the softmax model that a swapped config stands on."""
    cfg = copy.deepcopy(model_cfg)
    for tower in ("vision_cfg", "text_cfg"):
        cfg[tower].pop(KEY, None)
    return cfg
