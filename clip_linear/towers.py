"""The swap: put a variant into the blocks of a tower of a built model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from clip_linear import marker
from clip_linear.attention import AttentionBody, Tokens
from clip_linear.dress import Site
from clip_linear.errors import UserError
from clip_linear.hosts import HOSTS
from clip_linear.layers import chosen_layers
from clip_linear.names import parse_spec
from clip_linear.registry import declaration, variant_class


def swap_attention(
    model: nn.Module, image: str | dict[str, Any] | None = None, text: str | dict[str, Any] | None = None
) -> nn.Module:
    """Swap the attention of a built OpenCLIP model, or of a bare timm ViT, in place; None leaves a tower alone.

    A spec is a variant (``"mala"``), a variant with a preset (``"mala.paper"``) or a ``linear_attn`` dict. Returns the
    model. Raises UserError for unknown names and for towers that cannot be swapped (it names their class).
    """
    specs = {tower: parse_spec(spec) for tower, spec in (("image", image), ("text", text)) if spec is not None}
    for tower, spec in specs.items():
        if spec["kind"] != "softmax" and tower not in declaration(spec["kind"]).info.towers:
            raise UserError(f"variant {spec['kind']!r} has no form for the {tower} tower; run: clip-linear list")
    if "image" in specs:
        _swap_blocks(*_image_tower(model), specs["image"])
    if "text" in specs:
        _swap_blocks(*_text_tower(model), specs["text"])
    if specs:
        marker.attach(model, specs)
    return model


def _image_tower(model: Any) -> tuple[Any, Tokens, int]:
    tower = getattr(model, "visual", model)
    if hasattr(tower, "transformer") and hasattr(tower, "class_embedding"):  # OpenCLIP's VisionTransformer
        tokens = Tokens(grid=tuple(tower.grid_size), prefix=1)
        return tower.transformer, tokens, tower.positional_embedding.shape[0]
    trunk = getattr(tower, "trunk", tower)
    if hasattr(trunk, "blocks") and hasattr(getattr(trunk, "patch_embed", None), "grid_size"):  # timm ViT
        grid, prefix = tuple(trunk.patch_embed.grid_size), trunk.num_prefix_tokens
        return trunk.blocks, Tokens(grid=grid, prefix=prefix), prefix + grid[0] * grid[1]
    raise UserError(
        f"image tower {type(trunk).__name__} cannot be swapped; supported: OpenCLIP's VisionTransformer and timm ViTs"
    )


def _text_tower(model: Any) -> tuple[Any, Tokens, int]:
    tower = getattr(model, "text", model)
    if type(tower).__name__ not in ("CLIP", "TextTransformer") or not hasattr(tower, "transformer"):
        raise UserError(f"text tower {type(tower).__name__} cannot be swapped; supported: OpenCLIP's TextTransformer")
    causal = getattr(tower, "attn_mask", None) is not None
    return tower.transformer, Tokens(causal=causal), int(tower.positional_embedding.shape[0])


def attention_blocks(tower: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """(block, attention) of every self-attention block, in order; poolers and cross-attention are not blocks."""
    for block in tower.modules():
        attn = getattr(block, "attn", None)
        self_attention = hasattr(block, "mlp") and not hasattr(block, "ln_1_kv")
        if isinstance(attn, nn.Module) and self_attention:
            yield block, attn


def _swap_blocks(tower: nn.Module, tokens: Tokens, length: int, spec: dict[str, Any]) -> None:
    blocks = list(attention_blocks(tower))
    chosen = chosen_layers(spec.get("layers", "all"), len(blocks))
    cls = variant_class(spec["kind"])
    dress = declaration(spec["kind"]).dress(spec["preset"], spec.get("dress", {}))
    for number in chosen:
        attn = blocks[number][1]
        if type(attn) not in HOSTS:
            raise UserError(
                f"attention class {type(attn).__module__}.{type(attn).__name__} cannot be swapped; supported: "
                + ", ".join(c.__name__ for c in HOSTS)
            )
        if getattr(attn, "logit_scale", None) is not None:
            raise UserError("scaled_cosine_attn has no meaning without softmax; switch it off to swap this tower")
        projection = attn.proj if hasattr(attn, "proj") else attn.out_proj
        site = Site(
            width=getattr(attn, "attn_dim", projection.in_features),
            num_heads=attn.num_heads,
            length=length,
            grid=tokens.grid,
            prefix=tokens.prefix,
            causal=tokens.causal,
            mlp_width=_mlp_width(blocks[number][0]),
        )
        # Extra parameters must not shift the random numbers that the rest of the model, or the training, draws.
        with torch.random.fork_rng(devices=[]):
            body = AttentionBody(cls(site, **spec.get("options", {})), dress, site)
        attn.__class__ = HOSTS[type(attn)]
        attn.body = body.to(projection.weight.device)
        attn.tokens = tokens
        attn.register_load_state_dict_pre_hook(_keep_initial_extras)


def _mlp_width(block: Any) -> int:
    first = getattr(block.mlp, "c_fc", None)
    return int(first.out_features) if first is not None else 0


def _keep_initial_extras(
    module: Any,
    state_dict: dict[str, Tensor],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """A softmax checkpoint has none of this module's extras: they keep their values. Partial absence stays an error."""
    own = {f"body.{name}": value for name, value in module.body.state_dict().items()}
    if own and not any(prefix + name in state_dict for name in own) and any(k.startswith(prefix) for k in state_dict):
        state_dict.update({prefix + name: value.detach() for name, value in own.items()})
        marker.warn_once("the checkpoint holds no tensors of the swapped attention; they keep their initial values")
