"""The model config with what a run's flags change in it. Imports no torch."""

from __future__ import annotations

import copy
import math
from typing import Any

from clip_linear.train.config import TrainConfig


def model_kwargs(config: TrainConfig) -> dict[str, Any]:
    """Arguments of the model's class that flags decide."""
    kwargs: dict[str, Any] = {}
    if config.siglip:
        kwargs |= {"init_logit_scale": math.log(10), "init_logit_bias": -10}
    if config.fsdp:
        kwargs["nonscalar_logit_scale"] = True  # FSDP2 cannot shard a 0-d parameter
    return kwargs


def effective_config(config: TrainConfig) -> dict[str, Any]:
    """The model config with what flags changed in it, so that the run's folder alone rebuilds the model."""
    cfg, flags = copy.deepcopy(config.model_cfg), config.openclip
    cfg |= {k: v for k, v in model_kwargs(config).items() if k != "nonscalar_logit_scale"}
    if flags["force_quick_gelu"]:
        cfg["quick_gelu"] = True
    if flags["force_custom_text"]:
        cfg["custom_text"] = True
    for key, table, name in (
        ("force_patch_dropout", "vision_cfg", "patch_dropout"),
        ("force_image_size", "vision_cfg", "image_size"),
        ("force_context_length", "text_cfg", "context_length"),
    ):
        if flags[key] is not None:
            cfg[table][name] = flags[key]
    return cfg
