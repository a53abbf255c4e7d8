"""One optimizer step: forward, loss, backward (with OpenCLIP's feature caching for --accum-freq), clip, update."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clip_linear.train.config import TrainConfig
from clip_linear.train.statistics import still_statistics
from clip_linear.train.transfer import AttentionTransfer
from clip_linear.train.world import World
from clip_linear.train.wrap import whole

MAX_LOGIT_SCALE = math.log(100)  # the clamp of the CLIP paper
Pair = tuple[Tensor, Tensor]  # images [B, 3, H, W] and texts [B, L], on the host


class Stepper:
    """Takes optimizer steps on a model. Holds no state of its own beyond what it was made of."""

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,  # possibly wrapped (DDP) and compiled
        inner: nn.Module,  # the bare OpenCLIP model
        loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        teacher: nn.Module | None = None,
        transfer: AttentionTransfer | None = None,
    ) -> None:
        from open_clip import get_input_dtype
        from open_clip_train.precision import get_autocast

        self.config, self.model, self.inner, self.loss, self.teacher = config, model, inner, loss, teacher
        self.transfer = transfer
        self.optimizer, self.world, self.device = optimizer, world, world.device
        device = world.device
        self.parameters = [p for p in inner.parameters() if p.requires_grad]
        self.autocast = get_autocast(config.precision, device_type=device.type)
        self.dtype = get_input_dtype(config.precision)
        self.scaler = torch.amp.GradScaler(device.type) if config.precision == "amp" else None
        # A fused optimizer can skip an update by itself, so that a GPU need not wait for the host to look at the norm.
        self.skips_on_device = device.type == "cuda" and bool(optimizer.defaults.get("fused"))

    def __call__(self, pairs: Sequence[Pair]) -> tuple[Tensor, dict[str, Tensor]]:
        """Step on ``accum_freq`` pairs. Returns float32 [4] on the device and the parts of the loss. The four: loss,
        gradient norm, logit_scale, whether the update was skipped because loss or norm is not finite."""
        self.optimizer.zero_grad()
        moved = [self._move(pair) for pair in pairs]
        losses = self._backward_one(*moved[0]) if len(moved) == 1 else self._backward_many(moved)
        total = losses["loss"].detach().float()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norm = self._clip()
        bad = ~torch.isfinite(total)
        if self.scaler is None:
            bad = bad | ~torch.isfinite(norm)
        bad = self.world.any(bad)  # a rank's own loss may overflow alone, but all must skip together
        self._update(bad)
        scale: Any = self.inner.logit_scale
        with torch.no_grad():
            scale.clamp_(0, MAX_LOGIT_SCALE)
        return torch.stack([total, norm.float(), whole(scale).float().exp().reshape(()), bad.float()]), losses

    def _move(self, pair: Pair) -> Pair:
        images, texts = pair
        return (
            images.to(device=self.device, dtype=self.dtype, non_blocking=True),
            texts.to(device=self.device, non_blocking=True),
        )

    def _backward_one(self, images: Tensor, texts: Tensor) -> dict[str, Tensor]:
        with self.autocast():
            if self.transfer is not None:
                losses = self._total(self.transfer(self.model, images, texts))
            else:
                losses = self._compared(images, texts)
        self._backward(losses["loss"])
        return losses

    def _compared(self, images: Tensor, texts: Tensor) -> dict[str, Tensor]:
        out = self.model(images, texts)
        if self.teacher is not None:
            with torch.no_grad():
                out |= {f"dist_{k}": v for k, v in self.teacher(images, texts).items()}
        return self._total(self.loss(**out, output_dict=True))

    def _backward_many(self, pairs: list[Pair]) -> dict[str, Tensor]:
        """Features of all pairs without gradients first; then each pair again with gradients beside the others'."""
        cached: dict[str, list[Tensor]] = {}
        with torch.no_grad(), self.autocast(), still_statistics(self.inner):
            for images, texts in pairs:
                for key, value in self.model(images, texts).items():
                    if key not in ("logit_scale", "logit_bias"):
                        cached.setdefault(key, []).append(value)
        losses: dict[str, Tensor] = {}
        for j, (images, texts) in enumerate(pairs):
            last = j == len(pairs) - 1
            with self._sync_only_if(last):
                with self.autocast():
                    out = self.model(images, texts)
                    # Every pass sees the whole loss, so these would get len(pairs) times their gradient.
                    scales = {k: self._share(out.pop(k), len(pairs)) for k in ("logit_scale", "logit_bias") if k in out}
                    inputs = {k: torch.cat([*v[:j], out[k], *v[j + 1 :]]) for k, v in cached.items()}
                    losses = self._total(self.loss(**inputs, **scales, output_dict=True))
                self._backward(losses["loss"])
        return losses

    def _share(self, scale: Tensor, k: int) -> Tensor:
        """The same value with 1/k of the gradient (OpenCLIP lets it through whole)."""
        if self.config.openclip_accum_scale:
            return scale
        return scale.detach() + (scale - scale.detach()) / k

    def _sync_only_if(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """DDP reduces the gradients once a step, with the last pass."""
        no_sync = getattr(self.model, "no_sync", None)
        return contextlib.nullcontext() if last or no_sync is None else no_sync()

    @staticmethod
    def _total(losses: dict[str, Tensor]) -> dict[str, Tensor]:
        first, *rest = losses.values()
        return losses | {"loss": sum(rest, start=first)}

    def _backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _clip(self) -> Tensor:
        """Clip if asked; the norm of all gradients before clipping, as a 0-d tensor."""
        limit = self.config.grad_clip_norm
        if limit is not None:
            return whole(nn.utils.clip_grad_norm_(self.parameters, limit, norm_type=2.0))
        return whole(nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]))

    def _update(self, bad: Tensor) -> None:
        if self.scaler is not None:
            self.scaler.step(self.optimizer)  # skips by itself
            self.scaler.update()
        elif self.skips_on_device:
            self.optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not bad.item():
            self.optimizer.step()
