"""Another variant in a backbone's blocks, as ``NAME+IMAGE`` and ``linear_attn`` ask for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from clip_linear.attention import AttentionBody, Tokens
from clip_linear.backbones.attention import TokenAttention
from clip_linear.backbones.trunk import Trunk
from clip_linear.dress import Site
from clip_linear.errors import UserError
from clip_linear.layers import chosen_layers
from clip_linear.registry import declaration, variant_class

_PARTS = ("local", "norm", "gate", "table")


def swap_trunk(trunk: Trunk, spec: dict[str, Any]) -> None:
    """Put a variant into blocks of a built backbone, in place.

    The preset ``core`` keeps the backbone's own dress, with its parameters (so "InLine's equation in MAViT's dress");
    ``paper`` puts on the variant's published one. ``layers`` "all" means the linear blocks; softmax blocks are swapped
    only if they are named by number. Raises UserError for what does not fit.
    """
    blocks, kinds = trunk.blocks(), trunk.block_variants()
    layers = spec.get("layers", "all")
    chosen = chosen_layers(layers, len(blocks))
    if layers == "all":
        chosen = [i for i in chosen if kinds[i] != "softmax"]
    for i in chosen:
        if not isinstance(blocks[i].attn, TokenAttention):
            raise UserError(
                f"block {i} has softmax in windows with relative positions, which stays; take …-linear-CLIP"
            )
    bodies = [_make_body(blocks[i].attn, spec) for i in chosen]
    for i, body in zip(chosen, bodies):
        blocks[i].attn.body = body


def _make_body(attn: TokenAttention, spec: dict[str, Any]) -> AttentionBody:
    old, like = attn.body, attn.proj.weight
    if spec["preset"] == "paper":
        dress = declaration(spec["kind"]).dress("paper", spec.get("dress", {}))
    else:
        declaration(spec["kind"]).dress("core", spec.get("dress", {}))  # refuses parts that do not exist
        dress = dataclasses.replace(old.dress, **spec.get("dress", {}))
    if attn.reduction > 1 and dress.local == "dynamic3":
        raise UserError("spatial reduction with InLine's local term does not exist")
    # New parameters must not shift the random numbers that the rest of the model, or the training, draws.
    with torch.random.fork_rng(devices=[]):
        body = AttentionBody(variant_class(spec["kind"])(old.site, **spec.get("options", {})), dress, old.site)
    body = body.to(like.device, like.dtype).train(attn.training)
    for part in _PARTS:
        if getattr(dress, part) == getattr(old.dress, part):
            setattr(body, part, getattr(old, part))
    try_body(body, old.site, spec, like.device)
    return body


def try_body(body: AttentionBody, site: Site, spec: dict[str, Any], device: torch.device) -> None:
    """Run the equation once on two tokens, so that a wrong option fails here and not in the middle of a run."""
    q = torch.zeros(1, site.num_heads, 2, site.head_dim, device=device)
    tokens = Tokens(causal=site.causal)
    try:
        with torch.no_grad():
            if body.dress.rope:
                Tokens(grid=None if site.grid is None else (1, 2)).rope(site.head_dim, 2, device)
            body.variant.attend(q, q, q, tokens)
    except UserError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"variant {spec['kind']!r} cannot work with options {spec.get('options', {})}: {error}"
        ) from error
