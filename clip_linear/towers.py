"""The swap: put a variant into the blocks of a tower of a built model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from clip_linear import marker
from clip_linear.attention import AttentionBody
from clip_linear.backbones.swap import swap_trunk, try_body
from clip_linear.backbones.trunk import Trunk
from clip_linear.dress import Dress, Site
from clip_linear.errors import UserError
from clip_linear.hosts import HOSTS, HiddenHook
from clip_linear.layers import chosen_layers
from clip_linear.layout import Layout, follow_patch_dropout
from clip_linear.loading import fit_extras
from clip_linear.names import parse_spec
from clip_linear.registry import declaration, variant_class


def swap_attention(
    model: nn.Module, image: str | dict[str, Any] | None = None, text: str | dict[str, Any] | None = None
) -> nn.Module:
    """Swap the attention of a built OpenCLIP model, or of a bare timm ViT, in place; None leaves a tower alone.

    A spec is a variant (``"mala"``), a variant with a preset (``"mala.paper"``) or a ``linear_attn`` dict. Returns the
    model. Raises UserError for unknown names, for towers that cannot be swapped (it names their class) and for a tower
    that is swapped already.
    """
    specs = {tower: parse_spec(spec, tower) for tower, spec in (("image", image), ("text", text)) if spec is not None}
    for tower in specs:
        if tower in getattr(model, "_linear_attn_specs", {}):
            raise UserError(f"the {tower} tower is swapped already; build the model anew to give it another variant")
    for tower, spec in specs.items():
        trunk = getattr(getattr(model, "visual", model), "trunk", getattr(model, "visual", model))
        if tower == "image" and isinstance(trunk, Trunk):
            swap_trunk(trunk, spec)
            continue
        _swap_blocks(*(_image_tower if tower == "image" else _text_tower)(model), spec)
    if specs:
        marker.attach(model, specs)
    return model


def _image_tower(model: Any) -> tuple[Any, nn.Module, Layout, int]:
    """(tower, what holds its blocks, layout, number of tokens)."""
    tower = getattr(model, "visual", model)
    if hasattr(tower, "transformer") and hasattr(tower, "class_embedding"):  # OpenCLIP's VisionTransformer
        return tower, tower.transformer, Layout(tower, prefix=1), tower.positional_embedding.shape[0]
    trunk = getattr(tower, "trunk", tower)
    if hasattr(trunk, "blocks") and getattr(getattr(trunk, "patch_embed", None), "grid_size", None):  # timm ViT
        prefix, grid = getattr(trunk, "num_prefix_tokens", 0), trunk.patch_embed.grid_size
        return trunk, trunk.blocks, Layout(trunk.patch_embed, prefix=prefix), prefix + grid[0] * grid[1]
    raise UserError(
        f"image tower {type(trunk).__name__} cannot be swapped; supported: OpenCLIP's VisionTransformer, timm ViTs "
        "and our backbones (clip-linear list backbones)"
    )


def _text_tower(model: Any) -> tuple[Any, nn.Module, Layout, int]:
    tower = getattr(model, "text", model)
    if type(tower).__name__ not in ("CLIP", "TextTransformer") or not hasattr(tower, "transformer"):
        raise UserError(f"text tower {type(tower).__name__} cannot be swapped; supported: OpenCLIP's TextTransformer")
    causal = getattr(tower, "attn_mask", None) is not None
    return tower, tower.transformer, Layout(causal=causal), int(tower.positional_embedding.shape[0])


def attention_blocks(tower: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """(block, attention) of every self-attention block, in order; poolers and cross-attention are not blocks."""
    for block in tower.modules():
        attn = getattr(block, "attn", None)
        self_attention = (hasattr(block, "mlp") or hasattr(block, "ffn")) and not hasattr(block, "ln_1_kv")
        if isinstance(attn, nn.Module) and self_attention:
            yield block, attn


def _swap_blocks(tower: Any, holder: nn.Module, layout: Layout, length: int, spec: dict[str, Any]) -> None:
    blocks = list(attention_blocks(holder))
    if not blocks:
        raise UserError(f"tower {type(tower).__name__} has no self-attention blocks to swap")
    dress = declaration(spec["kind"]).dress(spec["preset"], spec.get("dress", {}))
    chosen = [blocks[number] for number in chosen_layers(spec.get("layers", "all"), len(blocks))]
    bodies = [_make_body(block, attn, layout, length, dress, spec) for block, attn in chosen]
    # Everything that can fail has been done: a refused model stays as it was.
    if any(body.needs_grid for body in bodies):
        follow_patch_dropout(tower, layout, [block for block, _ in blocks])
    for (block, attn), body in zip(chosen, bodies):
        attn.__class__ = HOSTS[type(attn)]
        attn.body, attn.layout = body, layout
        attn.register_load_state_dict_pre_hook(fit_extras)
        if body.mlp_conv is not None:
            _first_layer(block).register_forward_hook(HiddenHook(body, layout))


def _make_body(block: Any, attn: Any, layout: Layout, length: int, dress: Dress, spec: dict[str, Any]) -> AttentionBody:
    if type(attn) not in HOSTS:
        raise UserError(
            f"attention class {type(attn).__module__}.{type(attn).__name__} cannot be swapped; supported: "
            + ", ".join(f"{c.__module__}.{c.__name__}" for c in HOSTS)
        )
    if getattr(attn, "logit_scale", None) is not None:
        raise UserError("scaled_cosine_attn has no meaning without softmax; switch it off to swap this tower")
    projection = attn.proj if hasattr(attn, "proj") else attn.out_proj
    first = _first_layer(block)
    tokens = layout.tokens(length, False)
    site = Site(
        width=projection.in_features,
        num_heads=attn.num_heads,
        length=length,
        grid=tokens.grid,
        prefix=tokens.prefix,
        causal=tokens.causal,
        mlp_width=0 if first is None else first.out_features,
    )
    inner = getattr(attn, "qkv", projection).in_features
    if inner != site.width and (dress.gate or dress.local == "dynamic3"):
        raise UserError(
            f"this host's attention is {site.width} wide and its input {inner}; choose a preset without gate"
        )
    # Extra parameters must not shift the random numbers that the rest of the model, or the training, draws.
    with torch.random.fork_rng(devices=[]):
        body = AttentionBody(variant_class(spec["kind"])(site, **spec.get("options", {})), dress, site)
    body = body.to(projection.weight.device).train(attn.training)
    try_body(body, site, spec, projection.weight.device)
    return body


def _first_layer(block: Any) -> Any:
    mlp = block.mlp
    return getattr(mlp, "c_fc", getattr(mlp, "fc1", None))
