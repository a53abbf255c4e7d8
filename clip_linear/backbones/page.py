"""``clip-linear list backbones``: every registered size beside what was published of it. Without torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from clip_linear.backbones.cost import cost
from clip_linear.backbones.sizes import clip_names, size_of

# fmt: off
HEADERS = (
    "name", "CLIP model", "softmax blocks", "parameters (M)", "published", "GMACs", "published", "px", "pooled",
    "paper",
)
# fmt: on
FOOT = (
    "parameters and GMACs: those of the released code's model with 1,000 classes, at px; 'published': the paper's or "
    'README\'s (which call multiply-accumulates "FLOPs"), - where none is transcribed here.'
)


def record(name: str) -> dict[str, Any]:
    """All that is known of one registered size. Raises KeyError."""
    size, args = size_of(name)
    own = name == size.name
    found = cost(name)
    softmax = found.blocks - found.linear_blocks
    parameters, flops = size.published if own else (None, None)
    return {
        "name": name,
        "clip_model": clip_names()[name],
        "skeleton": size.skeleton,
        "variant": args["variant"],
        "softmax_blocks": size.softmax_blocks if own else "none",
        "n_softmax_blocks": softmax,
        "n_blocks": found.blocks,
        "image_size": size.img_size,
        "pooled_width": size.pooled,
        "n_params": found.parameters,
        "n_params_tower": found.tower,
        "gmacs": found.macs / 1e9,
        "published_params_m": parameters,
        "published_gflops": flops,
        "difference": size.why if own else "",
        "paper": size.paper,
    }


def rows(names: Iterable[str]) -> list[tuple[str, ...]]:
    """The table's rows under HEADERS."""
    out: list[tuple[str, ...]] = []
    for name in names:
        r = record(name)
        out.append(
            (
                name,
                r["clip_model"],
                r["softmax_blocks"],
                f"{r['n_params'] / 1e6:.2f}",
                _or_dash(r["published_params_m"]),
                f"{r['gmacs']:.2f}",
                _or_dash(r["published_gflops"]),
                str(r["image_size"]),
                str(r["pooled_width"]),
                r["paper"],
            )
        )
    return out


def notes(names: Iterable[str]) -> list[str]:
    """Why some numbers differ from the published ones, one line for each reason."""
    reasons: dict[str, list[str]] = {}
    for name in names:
        if record(name)["difference"]:
            reasons.setdefault(record(name)["difference"], []).append(name)
    return [f"{', '.join(found)}: {why}" for why, found in reasons.items()]


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
