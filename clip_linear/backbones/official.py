"""The released backbones: their constructor arguments and their weights, in our classes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from clip_linear.backbones.deit import PlainViT
from clip_linear.backbones.flags import mixed_flags
from clip_linear.backbones.hierarchy import Hierarchy
from clip_linear.backbones.pvt import Pyramid
from clip_linear.backbones.resizing import fit_state_dict
from clip_linear.backbones.swin import Windowed
from clip_linear.backbones.trunk import BLOCKS
from clip_linear.convert import rename_module
from clip_linear.errors import UserError, unknown

_OPTIONS = {"pola": {"alpha": "alpha"}, "focused": {"focusing_factor": "focusing_factor"}, "inline": {}}


def _hierarchy(variant: str, args: dict[str, Any]) -> nn.Module:
    values = args.get("layer_init_values", [1e-6] * 4)
    scales = args.get("layerscales", [False] * 4)
    depths = args.get("depths", [2, 2, 6, 2])
    return Hierarchy(
        variant=variant,
        nala=variant == "nala",
        flags=args.get("flagss") or "llvv",
        embed_dims=args.get("embed_dims", [64, 128, 256, 512]),
        depths=depths,
        num_heads=args.get("num_heads", [1, 2, 4, 8]),
        mlp_ratios=args.get("mlp_ratios", [3, 3, 3, 3]),
        projection=args.get("projection", 1024),
        layer_scale=[value if on else None for value, on in zip(values, scales)],
        **_common(args),
    )


def _pyramid(variant: str, args: dict[str, Any]) -> nn.Module:
    _five(args)
    return Pyramid(
        variant=variant,
        flags=args.get("attn_type", "LLLL"),
        options=_variant_options(variant, args),
        reductions=args.get("sr_ratios", [8, 4, 2, 1]),
        linear_reductions=[int(r) for r in str(args.get("la_sr_ratios", "8421"))],
        norm_eps=args.get("norm_eps", 1e-5),
        **{k: args[k] for k in ("embed_dims", "depths", "num_heads", "mlp_ratios", "patch_size") if k in args},
        **_common(args),
    )


def _windowed(variant: str, args: dict[str, Any]) -> nn.Module:
    _five(args)
    window, depths = args.get("window_size", 7), args.get("depths", [2, 2, 6, 2])
    softmax_window = max(7, window // 8) if variant == "inline" else 7 if window <= 56 else 12
    return Windowed(
        variant=variant,
        flags=mixed_flags(args.get("attn_type", "LLLL"), depths),
        options=_variant_options(variant, args),
        window_size=window,
        softmax_window=softmax_window,
        **{k: args[k] for k in ("embed_dim", "depths", "num_heads", "mlp_ratio", "patch_size") if k in args},
        **_common(args),
    )


def _deit(variant: str, args: dict[str, Any]) -> nn.Module:
    keys = ("embed_dim", "depth", "num_heads", "mlp_ratio", "patch_size")
    return PlainViT(variant=variant, **{k: args[k] for k in keys if k in args}, **_common(args))


def _common(args: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {k: args[k] for k in ("num_classes", "drop_path_rate") if k in args}
    if "img_size" in args:
        size = args["img_size"]
        out["img_size"] = size if isinstance(size, int) else tuple(size)
    return out


def _five(args: dict[str, Any]) -> None:
    if args.get("kernel_size", 5) != 5:
        raise UserError(f"kernel_size {args['kernel_size']} is not supported; the released models have 5")


def _variant_options(variant: str, args: dict[str, Any]) -> dict[str, Any]:
    options = {ours: args[theirs] for theirs, ours in _OPTIONS[variant].items() if theirs in args}
    if variant == "inline" and args.get("kernel_func") not in (None, "identity"):
        options["kernel"] = args["kernel_func"]
    return options


# family -> (variant, maker)
FAMILIES: dict[str, tuple[str, Callable[[str, dict[str, Any]], nn.Module]]] = {
    "mavit": ("mala", _hierarchy),
    "ravlt": ("rala", _hierarchy),
    "nalaformer": ("nala", _hierarchy),
    "pola_pvt": ("pola", _pyramid),
    "pola_swin": ("pola", _windowed),
    "flatten_pvt": ("focused", _pyramid),
    "flatten_swin": ("focused", _windowed),
    "inline_pvt": ("inline", _pyramid),
    "inline_swin": ("inline", _windowed),
    "inline_deit": ("inline", _deit),
}


def from_official(family: str, args: dict[str, Any]) -> nn.Module:
    """Our backbone for the constructor arguments of a released class. Raises UserError for an unknown family."""
    if family not in FAMILIES:
        raise unknown("backbone family", family, FAMILIES, f"use one of: {', '.join(FAMILIES)}")
    variant, make = FAMILIES[family]
    return make(variant, args)


def load_official(model: nn.Module, state_dict: dict[str, Tensor]) -> nn.Module:
    """Load a released state dict (its own names) into our backbone, in place; returns the model.

    Index, mask and angle buffers and unused norms are left out, tables resized. The keys of an all-linear and a
    released MAViT, RAVLT or NaLaFormer are the same: the caller must build the model with the right flags. Raises
    UserError for weights that do not fit.
    """
    ours = fit_state_dict(rename(state_dict, model), model)
    wanted = model.state_dict()
    ours[BLOCKS] = wanted[BLOCKS]  # the released files do not say
    if isinstance(model.head, nn.Identity):
        ours = {k: v for k, v in ours.items() if not k.startswith("head.")}
    wrong = [f"{k} {tuple(v.shape)}" for k, v in ours.items() if k in wanted and wanted[k].shape != v.shape]
    missing, extra = [k for k in wanted if k not in ours], [k for k in ours if k not in wanted]
    if wrong or missing or extra:
        parts = (("other shape", wrong), ("missing", missing), ("unknown", extra))
        said = "; ".join(f"{what}: {', '.join(n[:4])}{' …' if len(n) > 4 else ''}" for what, n in parts if n)
        raise UserError(f"these weights do not fit {type(model).__name__} ({said}); check --arch and --flags")
    model.load_state_dict({k: v.to(wanted[k].dtype) for k, v in ours.items()})
    return model


_DROPPED = re.compile(r"(RoPE\.angle|relative_position_index|attn_mask)$")
_SIMPLE = (
    (r"^patch_embed(\d)\.", lambda m: f"layers.{int(m[1]) - 1}.patch_embed."),
    (r"^pos_embed(\d)$", lambda m: f"layers.{int(m[1]) - 1}.patch_embed.pos_embed"),
    (r"^block(\d)\.(\d+)\.", lambda m: f"layers.{int(m[1]) - 1}.blocks.{m[2]}."),
    (r"^blocks\.", lambda m: "layers."),
    (r"\.(norm[12])\.norm\.", lambda m: f".{m[1]}."),
    (r"\.pos\.(weight|bias)$", lambda m: f".cpe1.{m[1]}"),
    (r"relative_position_bias_table$", lambda m: "bias_table"),
)
_FLAT = re.compile(r"(gamma_[12]|pos_embed|cls_token|bias_table)$")
_LINEAR = re.compile(r"(^|\.)(fc1|fc2|proj|head)\.weight$")


def rename(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A released state dict under our names and in our shapes (1×1 convolutions as linear layers, tables flat)."""
    out: dict[str, Tensor] = {}
    attention: dict[str, dict[str, Tensor]] = {}
    for name, value in state_dict.items():
        if _DROPPED.search(name) or (isinstance(model, Pyramid) and name.startswith("norm.")):
            continue
        for pattern, replacement in _SIMPLE:
            name = re.sub(pattern, replacement, name)
        if isinstance(model, PlainViT):
            name = name.replace("patch_embed.proj.", "patch_embed.")
        found = re.match(r"(.*\.attn)\.(?!bias_table)(.+)", name)
        if found:
            attention.setdefault(found[1], {})[found[2]] = value
        else:
            if _FLAT.search(name):
                value = value.flatten()
            elif _LINEAR.search(name) and value.shape[2:] == (1, 1):
                value = value.flatten(1)
            out[name] = value
    for prefix, weights in attention.items():
        out.update({f"{prefix}.{name}": value for name, value in rename_module(weights).items()})
    return out
