"""Profiles of towers that have no closed form here: the model is built on the meta device and its operators counted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from clip_linear.dress import evaluate
from clip_linear.errors import UserError
from clip_linear.openclip import register
from clip_linear.profile import Profile, TowerProfile, summary
from clip_linear.towers import attention_blocks


def measure(config: dict[str, Any]) -> Profile:
    """The profile of any OpenCLIP model config. Raises UserError for a tower that cannot be built without downloads."""
    model = build_on_meta(config)
    size = model.visual.image_size
    image = torch.zeros(1, 3, *((size, size) if isinstance(size, int) else size), device="meta")
    text = torch.zeros(1, config["text_cfg"].get("context_length", 77), dtype=torch.long, device="meta")
    vision = [p for p in model.visual.parameters()]
    other = [
        p for n, p in model.named_parameters() if n in ("logit_scale", "logit_bias") or n.startswith("text_decoder.")
    ]
    known = {id(p) for p in (*vision, *other)}
    words = [p for p in model.parameters() if id(p) not in known]
    table = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    embedding = max((t.numel() for t in table if any(t is p for p in words)), default=0)
    return summary(
        _tower(model, model.visual, lambda: model.encode_image(image), _numel(vision), 0),
        _tower(model, getattr(model, "text", model), lambda: model.encode_text(text), _numel(words), embedding),
        _numel(list(model.parameters())),
    )


def build_on_meta(config: dict[str, Any]) -> Any:
    """The model of a config without storage. Raises UserError where it needs a package or a download."""
    register()
    from open_clip import coca_model, model

    config = copy.deepcopy(config)
    text = config["text_cfg"]
    text["hf_model_pretrained"] = False
    custom = config.pop("custom_text", False) or "hf_model_name" in text
    cls = model.CLIP if not custom else coca_model.CoCa if "multimodal_cfg" in config else model.CustomTextCLIP
    try:
        with torch.device("meta"):
            built = cls(**config)
            if "timm_model_name" in config["vision_cfg"] and "image_size" in config["vision_cfg"]:
                built.visual.set_input_size(config["vision_cfg"]["image_size"])
    except UserError:
        raise
    except (ImportError, RuntimeError, OSError, TypeError) as error:
        raise UserError(f"this model cannot be built here: {type(error).__name__}: {error}") from error
    return built


def _numel(parameters: list[nn.Parameter]) -> int:
    return sum({id(p): p.numel() for p in parameters}.values())


def _tower(model: Any, tower: nn.Module, run: Callable[[], Any], parameters: int, embedding: int) -> TowerProfile:
    states: list[int] = []
    hooks = [
        attn.register_forward_pre_hook(lambda m, args, kwargs: states.append(_state(m, args[0])), with_kwargs=True)
        for _, attn in attention_blocks(tower)
    ]
    # In training mode: the inference-only fast path of nn.MultiheadAttention is one operator that is not counted.
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()  # one image may leave one value per channel, of which there are no statistics
    with FlopCounterMode(display=False) as counter:
        run()
    for hook in hooks:
        hook.remove()
    by_operator = counter.get_flop_counts()["Global"]
    core = sum(n for op, n in by_operator.items() if "bmm" in str(op) or "scaled_dot_product" in str(op))
    total = counter.get_total_flops()
    return TowerProfile(
        parameters=parameters,
        embedding=embedding,
        macs=total // 2,
        core_macs=core // 2,
        state=sum(states) if states else None,
    )


def _state(attn: Any, x: torch.Tensor) -> int:
    parts = x.shape[0] if x.ndim == 3 else 1  # one sample's windows, where there are any
    if not hasattr(attn, "body"):
        return 2 * parts * x.shape[-2] * x.shape[-1]  # softmax keeps every key and value
    site = attn.body.site
    return int(parts * site.num_heads * evaluate(attn.body.variant.info.state_per_head, site.sizes))
