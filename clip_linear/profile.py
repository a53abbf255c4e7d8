"""What a model costs before it is built: parameters, multiply–accumulates and attention state, in closed form.

Exact for OpenCLIP's own towers, swapped or not, and without torch. Other towers (timm, Hugging Face, ResNet, CoCa) are
built on the meta device and counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clip_linear.dress import Site, dress_macs, dress_parameters, evaluate
from clip_linear.errors import UserError
from clip_linear.layers import chosen_layers
from clip_linear.names import KEY, tower_spec
from clip_linear.registry import VariantInfo, declaration, own_parameters

CHUNK = 128  # causal attention up to this length (or twice the features) takes the masked quadratic form


@dataclass(frozen=True, kw_only=True)
class TowerProfile:
    """One tower. MACs are those of one forward pass of one sample, at evaluation (no patch dropout)."""

    parameters: int
    embedding: int  # of these, in the token table
    macs: int
    core_macs: int  # of these, in the attention equations
    state: int | None  # numbers that all layers' attention states hold: keys and values for softmax; None: not known


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model: parameters, and 1e9 multiply–accumulates of one image and of one text forward pass."""

    n_params_vision: int
    n_params_text: int
    n_params_embedding: int
    n_params_total: int
    gmacs_image: float
    gmacs_text: float
    gmacs: float
    core_share_image: float
    core_share_text: float
    state_image: int | None
    state_text: int | None


def profile(model_config: dict[str, Any], image_size: int | None = None) -> Profile:
    """The profile of an OpenCLIP model config (as ``names.model_config`` resolves it), optionally at another size.

    Raises UserError for specs that do not fit and for towers that cannot be built here.
    """
    config = {**model_config}
    if image_size is not None:
        config["vision_cfg"] = {**config["vision_cfg"], "image_size": image_size}
    if _is_plain(config):
        image, text = _image_tower(config), _text_tower(config)
        scalars = 1 + (config.get("init_logit_bias") is not None)
        return summary(image, text, image.parameters + text.parameters + scalars)
    from clip_linear.measure import measure

    return measure(config)


def summary(image: TowerProfile, text: TowerProfile, total: int) -> Profile:
    """The profile of a model from those of its towers and its number of parameters in all."""
    return Profile(
        n_params_vision=image.parameters,
        n_params_text=text.parameters,
        n_params_embedding=image.embedding + text.embedding,
        n_params_total=total,
        gmacs_image=image.macs / 1e9,
        gmacs_text=text.macs / 1e9,
        gmacs=(image.macs + text.macs) / 1e9,
        core_share_image=image.core_macs / max(1, image.macs),
        core_share_text=text.core_macs / max(1, text.macs),
        state_image=image.state,
        state_text=text.state,
    )


# Keys with a place in the closed form; a config with any other is built and counted.
# fmt: off
_BLOCK_KEYS = {
    "layers", "width", "mlp_ratio", "ls_init_value", "block_type", "qk_norm", "scaled_cosine_attn", "scale_heads",
    "scale_attn_inner", "scale_attn", "scale_fc", "act_kwargs", "output_tokens", "pool_type", "final_ln_after_pool",
}
_IMAGE_KEYS = {
    "head_width", "patch_size", "image_size", "patch_dropout", "no_ln_pre", "pos_embed_type", "attentional_pool",
}
_TEXT_KEYS = {
    "heads", "context_length", "vocab_size", "hf_tokenizer_name", "tokenizer_mode", "tokenizer_kwargs", "pad_id",
    "eos_id", "no_causal_mask", "proj_bias", "proj_type",
}
_MODEL_KEYS = {
    "embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "init_logit_scale", "init_logit_bias",
    "nonscalar_logit_scale", "cast_dtype", "output_dict", "custom_text",
}
# fmt: on


def _is_plain(config: dict[str, Any]) -> bool:
    vision, text = config["vision_cfg"], config["text_cfg"]
    return (
        config.keys() <= _MODEL_KEYS
        and vision.keys() <= _BLOCK_KEYS | _IMAGE_KEYS | {KEY}
        and text.keys() <= _BLOCK_KEYS | _TEXT_KEYS | {KEY}
        and not isinstance(vision.get("layers", 12), list | tuple)
        and not vision.get("attentional_pool")
    )


def _image_tower(config: dict[str, Any]) -> TowerProfile:
    cfg, embed_dim = config["vision_cfg"], config["embed_dim"]
    width = cfg.get("width", 768)
    (height, across), (patch_h, patch_w) = _pair(cfg.get("image_size", 224)), _pair(cfg.get("patch_size", 16))
    grid = height // patch_h, across // patch_w
    if 0 in grid:
        raise UserError(f"image size {height}×{across} holds no patch of {patch_h}×{patch_w}; give a larger one")
    patches = grid[0] * grid[1]
    site = Site(
        width=width,
        num_heads=width // cfg.get("head_width", 64),
        length=patches + 1,
        grid=grid,
        prefix=1,
        mlp_width=int(width * cfg.get("mlp_ratio", 4.0)),
    )
    stem = 3 * patch_h * patch_w * width
    rest = stem + width + site.length * width + 2 * width + width * embed_dim
    if not cfg.get("no_ln_pre"):
        rest += 2 * width
    return _tower(config, "image", cfg.get("layers", 12), site, rest, 0, patches * stem + width * embed_dim)


def _text_tower(config: dict[str, Any]) -> TowerProfile:
    cfg, embed_dim = config["text_cfg"], config["embed_dim"]
    width = cfg.get("width", 512)
    site = Site(
        width=width,
        num_heads=cfg.get("heads", 8),
        length=cfg.get("context_length", 77),
        causal=not cfg.get("no_causal_mask"),
        mlp_width=int(width * cfg.get("mlp_ratio", 4.0)),
    )
    table = cfg.get("vocab_size", 49408) * width
    rest = table + site.length * width + 2 * width
    projection = 0 if cfg.get("proj_type", "linear") == "none" or not embed_dim else width * embed_dim
    if projection and cfg.get("proj_bias"):
        rest += embed_dim
    return _tower(config, "text", cfg.get("layers", 12), site, rest + projection, table, projection)


def _tower(
    config: dict[str, Any], tower: str, depth: int, site: Site, rest: int, embedding: int, rest_macs: int
) -> TowerProfile:
    cfg = config["vision_cfg" if tower == "image" else "text_cfg"]
    plain: dict[str, Any] = {"kind": "softmax", "preset": "core"}
    spec = tower_spec(config, tower) or plain
    swapped = set(chosen_layers(spec.get("layers", "all"), depth))
    parameters, macs, core, state = rest, rest_macs, 0, 0
    for number in range(depth):
        what = spec if number in swapped else plain
        known = declaration(what["kind"])
        dress = known.dress(what["preset"], what.get("dress", {}))
        parameters += _block_parameters(cfg, site) + sum(own_parameters(known.info, site).values())
        parameters += sum(dress_parameters(dress, site).values())
        one = site.num_heads * core_macs(known.info, site, dress.rope)
        core += one
        macs += one + dress_macs(dress, site) + site.length * (4 * site.width**2 + 2 * site.width * site.mlp_width)
        state += site.num_heads * evaluate(known.info.state_per_head, site.sizes)
    return TowerProfile(parameters=parameters, embedding=embedding, macs=macs, core_macs=core, state=state)


def _block_parameters(cfg: dict[str, Any], site: Site) -> int:
    C, M = site.width, site.mlp_width
    count = 4 * C * C + 4 * C + 2 * C * M + M + C + 4 * C  # attention, MLP, two norms
    count += 2 * C * (cfg.get("ls_init_value") is not None)
    switches = ("qk_norm", "scaled_cosine_attn", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc")
    kind = cfg.get("block_type")
    if kind == "custom" or (kind is None and any(cfg.get(s) for s in switches)):
        sizes = (4 * site.head_dim, site.num_heads, site.num_heads, 2 * C, 2 * C, 2 * M)
        count += sum(size for switch, size in zip(switches, sizes) if cfg.get(switch))
    return count


def core_macs(info: VariantInfo, site: Site, rope: bool = False) -> int:
    """Multiply–accumulates of the attention equation in one head of one layer, for one sample.

    All tokens: states S and φ(q)S, and φ(q)·s. Causal: the masked quadratic form where that is what runs, chunks above;
    with rotary embeddings the scores of the normaliser are others than those of the sum over v.
    """
    if info.macs:
        return evaluate(info.macs, site.sizes)
    total, N = evaluate(info.feature_macs or "0", site.sizes), site.length
    for features, values in info.streams:
        F, E = evaluate(features, site.sizes), evaluate(values, site.sizes)
        if site.causal:
            chunk = N if max(2 * F, CHUNK) >= N else CHUNK
            padded = N if chunk == N else N + -N % CHUNK
            total += padded * chunk * (F + E + F * rope) + (0 if chunk == N else 2 * padded * F * E + padded * F)
        else:
            total += 2 * N * F * E + N * F
    return total


def _pair(size: Any) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))
