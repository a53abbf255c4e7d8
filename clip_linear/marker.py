"""The spec buffer: 256 bytes in the state dict that say which attention the weights were trained with.

A linear model without extra parameters has the same keys and shapes as the softmax model, so its checkpoint would load
into softmax without a word. With the buffer, vanilla OpenCLIP fails ("Unexpected key(s)") and our models explain.
Models whose swapped towers are all plain softmax carry no buffer: their checkpoints are OpenCLIP's.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

import torch
from torch import Tensor

from clip_linear.errors import UserError

NAME = "clip_linear_spec"
SIZE = 256
_log = logging.getLogger(__name__)
_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Log a warning the first time this message comes up in this process."""
    if message not in _warned:
        _warned.add(message)
        _log.warning(message)


def encode(specs: dict[str, dict[str, Any]]) -> Tensor:
    """Specs per tower as uint8 [256]: canonical JSON, or its kinds and hash where that is longer."""
    text = json.dumps(specs, sort_keys=True, separators=(",", ":"))
    if len(text.encode()) > SIZE:
        short = {tower: f"{s['kind']}.{s['preset']}" for tower, s in specs.items()}
        text = json.dumps(short | {"sha256": hashlib.sha256(text.encode()).hexdigest()}, sort_keys=True)
    return torch.tensor(list(text.encode().ljust(SIZE)[:SIZE]), dtype=torch.uint8)


def decode(buffer: Tensor) -> str:
    """The text in a buffer, for messages."""
    return bytes(buffer.flatten().to(torch.uint8).tolist()).decode(errors="replace").strip()


def _plain(spec: dict[str, Any]) -> bool:
    return spec["kind"] == "softmax" and spec["preset"] == "core" and not spec.get("dress")


def attach(model: Any, specs: dict[str, dict[str, Any]]) -> None:
    """Give a model the buffer and the hooks that keep it true; later swaps of the other tower are added to it."""
    specs = {**getattr(model, "_linear_attn_specs", {}), **specs}
    first = not hasattr(model, "_linear_attn_specs")
    model._linear_attn_specs = specs
    if not all(_plain(s) for s in specs.values()):
        model.register_buffer(NAME, encode(specs))
    if first:
        model.register_load_state_dict_pre_hook(_check)
        model.register_state_dict_post_hook(_rewrite)


def need_softmax_weights(model: Any, pretrained: str) -> None:
    """Raise UserError where the weights that were loaded last were trained with linear attention."""
    if not getattr(model, "_has_softmax_weights", True):
        raise UserError(
            f"--pretrained {pretrained!r} was trained with linear attention already; give the softmax model's weights"
        )


def _check(
    module: Any,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    specs, key = module._linear_attn_specs, prefix + NAME
    plain = all(_plain(s) for s in specs.values())
    module._has_softmax_weights = key not in state_dict
    if key not in state_dict:
        if not plain:
            warn_once("the checkpoint is a softmax one; its weights now serve linear attention")
            state_dict[key] = encode(specs)
    elif plain or not torch.equal(state_dict[key].cpu().flatten(), encode(specs)):
        found, wanted = decode(state_dict[key]), json.dumps(specs, sort_keys=True, separators=(",", ":"))
        raise UserError(
            f"the checkpoint was trained with attention {found}, this model has {wanted}; "
            "build the model by the name it was trained with (see the run's open_clip_config.json)"
        )


def _rewrite(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    # Averaged models average it, meta-device loading leaves it empty: what is saved is made anew from the specs.
    if prefix + NAME in state_dict:
        state_dict[prefix + NAME] = encode(module._linear_attn_specs).to(state_dict[prefix + NAME].device)


def strip_spec(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy without the buffer, for code that must have OpenCLIP's own keys alone; nothing guards it any more."""
    return {name: value for name, value in state_dict.items() if name.split(".")[-1] != NAME}
