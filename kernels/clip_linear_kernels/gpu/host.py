"""What the launchers share: padded sizes, configs, strides, optional pointers, and the state of the keys."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from clip_linear_kernels.call import Form, Inputs
from clip_linear_kernels.gpu import configs
from clip_linear_kernels.gpu import forward as kernels
from clip_linear_kernels.gpu.tiles import INTERPRETED
from clip_linear_kernels.spec import FEATURES, NORMALISERS


class Sizes:
    """Padded sizes and the constants that all kernels of a call share."""

    def __init__(self, x: Inputs) -> None:
        self.batch, self.heads, self.queries, self.features = x.q.shape
        self.keys, self.values = x.v.shape[-2:]
        self.FP, self.EP = (max(16, 1 << (n - 1).bit_length()) for n in (self.features, self.values))
        self.state = self.FP * self.EP + 2 * self.FP + self.EP + 16
        self.gradient = self.state + self.EP
        self.rows = self.batch * self.heads
        self.device, self.den = x.v.device, x.qd is not None
        self.arch = 90 if INTERPRETED else _arch(x.v.device.index or 0)
        self.constants: dict[str, Any] = {
            "F": self.features, "FP": self.FP, "E": self.values, "EP": self.EP,
            "PRECISION": "ieee" if torch.version.hip or INTERPRETED else "tf32x3",
        }  # fmt: skip

    def config(self, kernel: str) -> configs.Config | None:
        """The kernel's entry, None where it has none."""
        if INTERPRETED:
            return configs.Config(16, 4, 1)
        return configs.lookup(kernel, self.arch, self.FP, self.EP, self.den)

    def need(self, kernel: str) -> configs.Config:
        """The kernel's entry, which must be there."""
        config = self.config(kernel)
        assert config is not None, f"{kernel} has no entry at F = {self.FP}, E = {self.EP}"
        return config

    def splits(self, length: int, block: int) -> int:
        """Into how many parts to cut a sequence, so that few heads fill the device too."""
        most = -(-length // block)
        return min(most, 3) if INTERPRETED else max(1, min(most, -(-configs.TARGET_PROGRAMS // self.rows)))


@functools.cache
def _arch(index: int) -> int:
    if torch.version.hip:
        return 0
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def unit(x: Tensor) -> Tensor:
    """x with adjacent channels: itself, or a copy where they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rows_of(x: Inputs) -> Inputs:
    """The tensors as kernels read them: rows; w and eps in float32, eps broadcast."""
    w = None if x.w is None else unit(x.w.float())
    eps = None if x.eps is None else x.eps.float().expand(x.q.shape[0], x.q.shape[1], x.q.shape[2], 1)
    qd, kd = (None if t is None else unit(t) for t in (x.qd, x.kd))
    return Inputs(unit(x.q), unit(x.k), unit(x.v), qd, kd, w, eps)


def strides(x: Tensor | None) -> tuple[int, int, int]:
    """Strides of batch, head and token."""
    return (0, 0, 0) if x is None else (x.stride(0), x.stride(1), x.stride(2))


def w_strides(x: Inputs) -> tuple[int, int]:
    """Strides of batch and head of w, 0 where it is broadcast."""
    if x.w is None:
        return 0, 0
    return (x.w.stride(0) if x.w.shape[0] > 1 else 0), (x.w.stride(1) if x.w.shape[1] > 1 else 0)


def or_else(x: Tensor | None, instead: Tensor) -> Tensor:
    """A kernel whose HAS_ flag is false never reads the pointer, but it wants one."""
    return instead if x is None else x


def run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], config: configs.Config, **constants: Any) -> None:
    """Launch."""
    kernel[grid](*args, **constants, num_warps=config.warps, num_stages=config.stages)


def state_parts(x: Inputs, form: Form, sizes: Sizes, config: configs.Config, splits: int) -> Tensor:
    """The states of ``splits`` parts of the keys, [B·H, splits, SIZE]."""
    parts = torch.empty(sizes.rows, splits, sizes.state, dtype=torch.float32, device=x.v.device)
    args = (
        x.k, x.v, or_else(x.kd, x.k), or_else(x.w, x.v), parts, sizes.keys, sizes.heads, splits,
        *strides(x.k), *strides(x.v), *strides(x.kd), *w_strides(x),
    )  # fmt: skip
    flags = {"PHI": FEATURES[form.feature].code, "HAS_W": x.w is not None, "HAS_DEN": x.kd is not None}
    run(kernels.state_forward, (splits, sizes.rows), args, config, BN=config.block, **flags, **sizes.constants)
    return parts


def codes_of(x: Inputs, form: Form) -> dict[str, Any]:
    """The mode of a call, as kernels know it."""
    return {
        "PHI": FEATURES[form.feature].code,
        "NORM": NORMALISERS[form.normaliser].code,
        "HAS_DEN": x.qd is not None,
        "HAS_EPS": x.eps is not None,
    }
