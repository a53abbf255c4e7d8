"""What a backend is given: the tensors and the constants of one call, already checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Elements of one [tokens, features] temporary: 8 MiB of float32. Below that, calls cost more than they save.
BLOCK_ELEMENTS = 1 << 21


@dataclass(frozen=True, slots=True)
class Form:
    """What is constant in a call; ``eps`` counts only where no tensor eps stands beside the tensors."""

    feature: str
    normaliser: str
    causal: bool
    scale: float
    eps: float


@dataclass(slots=True)
class Inputs:
    """The tensors of a call: q, qd [B, H, N, F], k, kd [B, H, M, F], v [B, H, M, E], w [B, H|1, M], eps [B, H, N, 1].

    A dimension of size 1 in w or eps is broadcast.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    qd: Tensor | None = None
    kd: Tensor | None = None
    w: Tensor | None = None
    eps: Tensor | None = None

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Slices of batch and heads whose temporaries stay small."""
        batch, heads, length, width = self.q.shape
        per_head = max(1, max(length, self.k.shape[2]) * max(width, self.v.shape[-1]))
        rows = max(1, BLOCK_ELEMENTS // max(1, per_head * heads))
        per_block = max(1, heads if rows > 1 else min(heads, BLOCK_ELEMENTS // per_head))
        for start in range(0, batch, rows):
            for first in range(0, heads, per_block):
                yield slice(start, start + rows), slice(first, first + per_block)

    def at(self, rows: slice, heads: slice) -> Inputs:
        """One block, in one dtype: float32, or float64 where v is."""
        dtype = torch.float64 if self.v.dtype == torch.float64 else torch.float32

        def pick(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            x = x[rows] if x.shape[0] > 1 else x
            return (x[:, heads] if x.shape[1] > 1 else x).to(dtype)

        q, k, v = (x[rows, heads].to(dtype) for x in (self.q, self.k, self.v))
        return Inputs(q, k, v, pick(self.qd), pick(self.kd), pick(self.w), pick(self.eps))


class Backend(Protocol):
    """A module that does the arithmetic of checked calls."""

    def keeps(self, x: Inputs, form: Form) -> tuple[int, ...]:
        """Shape of the float32 state that ``forward`` keeps for ``backward``; (0,) for none."""

    def forward(self, x: Inputs, form: Form) -> tuple[Tensor, Tensor | None]:
        """Output [B, H, N, E] in v's dtype, token-major, and the kept state."""

    def backward(self, grad: Tensor, x: Inputs, state: Tensor | None, form: Form, out: Inputs) -> None:
        """Fill the gradients ``out`` (empty; w: zeros); None there for what is absent or not needed."""


def token_major(like: Tensor, width: int, length: int) -> Tensor:
    """An empty [B, H, N, width] laid out as [B, N, H, width], so that merging the heads needs no copy."""
    batch, heads, *_ = like.shape
    row = heads * width
    return like.new_empty_strided((batch, heads, length, width), (length * row, width, row, 1))


def empty_gradients(x: Inputs, needs_w: bool) -> Inputs:
    """Where a backward pass writes: like the inputs, token-major; w zeros, None when not needed."""
    q, k, v, qd, kd = (
        None if t is None else token_major(t, t.shape[-1], t.shape[-2]) for t in (x.q, x.k, x.v, x.qd, x.kd)
    )
    assert q is not None and k is not None and v is not None
    return Inputs(q, k, v, qd, kd, torch.zeros_like(x.w) if needs_w and x.w is not None else None)
