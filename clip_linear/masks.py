"""Attention masks: linear attention can be causal and can leave keys out; any other mask is refused, never ignored."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from clip_linear.attention import Tokens

MASKED = -1e4  # an additive mask's entries are 0 (keep) or at most this, usually −inf


def with_mask(tokens: Tokens, mask: Tensor | None, num_heads: int, true_is_masked: bool) -> Tokens:
    """Tokens with a call's mask understood.

    mask: None; [L, L], the causal one; or [B·H, L, L] (or [B, H, L, L]) that hides whole keys, besides the causal part
    in a causal tower. Its last row is then the key mask. Raises ValueError for every other mask; values are looked at
    on the CPU at once, on accelerators and in compiled graphs by an assertion that does not make anyone wait.
    """
    if mask is None:
        if tokens.causal:
            raise ValueError("this tower was built causal but was called without its mask")
        return tokens
    shape = tuple(mask.shape)
    if mask.dtype == torch.bool:
        allowed, clear = ~mask if true_is_masked else mask, None
    else:
        allowed = mask == 0
        clear = (allowed | (mask <= MASKED)).all()
    expected = torch.ones(shape[-2:], dtype=torch.bool, device=mask.device)
    if tokens.causal:
        expected = expected.tril()
    if mask.ndim == 2 and tokens.causal and shape[0] == shape[1]:
        fits = (allowed == expected).all()
    elif mask.ndim in (3, 4) and shape[-1] == shape[-2] and shape[0] % (num_heads if mask.ndim == 3 else 1) == 0:
        allowed = allowed.unflatten(0, (-1, num_heads)) if mask.ndim == 3 else allowed
        keep = allowed[:, 0, -1]  # [B, L]; the causal part hides nothing from the last token
        fits = (allowed == (expected & keep[:, None, None])).all()
        tokens = dataclasses.replace(tokens, key_mask=keep)
    else:
        raise ValueError(_message(shape))
    _require(fits if clear is None else fits & clear, _message(shape))
    return tokens


def _message(shape: tuple[int, ...]) -> str:
    return (
        f"attention mask of shape {shape} is neither the causal mask this tower was built with nor a mask of whole "
        "keys; linear attention supports no other"
    )


def _require(condition: Tensor, message: str) -> None:
    if condition.device.type == "meta":
        return
    if condition.device.type == "cpu" and not torch.compiler.is_compiling():
        if not condition:
            raise ValueError(message)
    else:
        torch._assert_async(condition, message)
