"""Softmax weights in a swapped model, as a folder that OpenCLIP loads by ``local-dir:``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from clip_linear.errors import UserError
from clip_linear.factory import create_model, weights_of, weights_that_fit
from clip_linear.files import write_json
from clip_linear.marker import need_softmax_weights
from clip_linear.names import model_config
from clip_linear.train.checkpoint import OPENCLIP_CONFIG, WEIGHTS, write_weights


def export_swapped(model: str, pretrained: str, out: Path, seed: int = 0) -> int:
    """Build ``model`` from a checkpoint's path or a tag of its base model, write the folder; returns its parameters.

    New tensors keep their initial values, drawn from ``seed``. Raises UserError for a folder that is not empty and for
    weights that do not fit.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {str(out)!r} is not empty; give a new folder")
    _, config = model_config(model)
    torch.manual_seed(seed)
    pretrained = weights_of(pretrained)
    try:
        with weights_that_fit(model, pretrained):
            built: Any = create_model(model, pretrained=pretrained)
    except UserError:
        raise
    except (RuntimeError, OSError, ValueError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"--pretrained {pretrained!r} cannot be used: {first}") from error
    need_softmax_weights(built, pretrained)
    visual = built.visual
    preprocess = {"mean": visual.image_mean, "std": visual.image_std}
    preprocess |= {k: v for k, v in visual.preprocess_cfg.items() if k in ("interpolation", "resize_mode")}
    write_weights(out / WEIGHTS, built.state_dict())
    # The config comes last: without the weights OpenCLIP would build such a folder with random ones.
    write_json(out / OPENCLIP_CONFIG, json.loads(json.dumps({"model_cfg": config, "preprocess_cfg": preprocess})))
    return sum(p.numel() for p in built.parameters())
