"""Equations whose features are much larger than their inputs: run in blocks, and computed again for the backward pass.

A chain of element-wise feature maps under autograd keeps every step, for PolaFormer ten times the queries. Here the
inputs alone are kept, and only one block's steps are alive at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# Elements of one input tensor in a block: below that, calls cost more than they save.
BLOCK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}

Function = Callable[..., Tensor]
Block = tuple[slice, slice]


def by_blocks(function: Function, *tensors: Tensor | None) -> Tensor:
    """``function(*tensors)``, evaluated for blocks of the first two dimensions (samples and heads, or tokens).

    Each tensor is None or [B or 1, H or 1, …], the first one [B, H, …]; the result is [B, H, …]. The function must
    treat these dimensions independently and must be deterministic. Differentiable once.
    """
    if torch.compiler.is_compiling():
        return function(*tensors)  # the compiler decides itself what to keep
    return _ByBlocks.apply(function, *tensors)


class _ByBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Function, *tensors: Tensor | None) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        out: Tensor | None = None
        for block in _blocks(tensors):
            part = function(*(_at(t, block) for t in tensors))
            if out is None:
                assert tensors[0] is not None
                out = part.new_empty(*tensors[0].shape[:2], *part.shape[2:])
            out[block] = part
        assert out is not None
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        grads = [torch.zeros_like(t) if n else None for t, n in zip(tensors, needed)]
        for block in _blocks(tensors):
            parts = [None if t is None else _at(t, block).detach().requires_grad_(n) for t, n in zip(tensors, needed)]
            with torch.enable_grad():
                out = ctx.function(*parts)
            wanted = [p for p, n in zip(parts, needed) if n and p is not None]
            found = iter(torch.autograd.grad(out, wanted, grad[block], allow_unused=True))
            for whole in grads:
                if whole is not None and (part := next(found)) is not None:
                    _at(whole, block).add_(part)
        return (None, *grads)


def _blocks(tensors: tuple[Tensor | None, ...]) -> Iterator[Block]:
    first = tensors[0]
    assert first is not None
    limit = BLOCK_ELEMENTS.get(first.device.type, BLOCK_ELEMENTS["cuda"])
    B, H = first.shape[:2]
    per_head = max(1, first[0, 0].numel())
    rows = max(1, limit // (per_head * H))
    columns = H if rows > 1 else max(1, min(H, limit // per_head))
    for row in range(0, B, rows):
        for column in range(0, H, columns):
            yield slice(row, row + rows), slice(column, column + columns)


def _at(x: Tensor | None, block: Block) -> Any:
    if x is None:
        return None
    rows, columns = block
    return x[rows if x.shape[0] > 1 else slice(None), columns if x.shape[1] > 1 else slice(None)]
