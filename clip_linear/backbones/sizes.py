"""The released sizes of the papers' backbones. Data only: nothing here imports torch.

``published`` are the papers' or READMEs' numbers (parameters in millions, "FLOPs" in 10⁹, which are multiply–
accumulates); ``why`` says where ours, which are the released code's, differ from them and for what reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_GATE = "inferred: without the output gate's projection the counts agree with the published ones"
_SHORT = {"tiny": "T", "small": "S", "medium": "M", "base": "B", "large": "L", "xtiny": "XT"}


@dataclass(frozen=True, kw_only=True)
class Size:
    """One released model: its class (a module of this package), its arguments, what was published."""

    name: str
    label: str
    skeleton: str  # "hierarchy", "pvt", "swin" or "deit"
    paper: str
    pooled: int  # width of the pooled feature
    softmax_blocks: str = "none"  # as released
    img_size: int = 224
    published: tuple[float | None, float | None] = (None, None)
    why: str = ""
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def all_linear(self) -> bool:
        """Whether the released model has no softmax block."""
        return self.softmax_blocks == "none"


def _hierarchies() -> list[Size]:
    dims = {
        "tiny": ((64, 128, 256, 512), (2, 2, 6, 2), (1, 2, 4, 8), 0.1),
        "small": ((64, 128, 320, 512), (3, 5, 9, 3), (1, 2, 5, 8), 0.15),
        "base": ((96, 192, 384, 512), (4, 6, 12, 6), (1, 2, 6, 8), 0.4),
        "large": ((96, 192, 448, 640), (4, 7, 19, 8), (1, 2, 7, 10), 0.55),
        "xtiny": ((32, 64, 128, 384), (2, 2, 2, 2), (1, 2, 4, 12), 0.1),
    }
    scale = {"base": (1, 1, 1e-6, 1e-6), "large": (1e-6,) * 4}
    published = {
        "mavit": {"small": (27, 4.6), "base": (50, 9.9), "large": (98, 16.1)},
        "ravlt": {"tiny": (15, 2.4), "small": (26, 4.6), "base": (48, 9.9), "large": (95, 16.0)},
        "nalaformer": {
            "xtiny": (8, 1.0), "tiny": (15, 2.7), "small": (26, 5.1), "base": (52, 12), "large": (95, 18),
        },
    }  # fmt: skip
    out = []
    for family, label, variant, paper in (
        ("mavit", "MAViT", "mala", "Fan et al. 2025, arXiv 2507.00698"),
        ("ravlt", "RAVLT", "rala", "Fan et al. 2025, arXiv 2411.07635"),
        ("nalaformer", "NaLaFormer", "nala", "Meng et al. 2025, arXiv 2506.21137"),
    ):
        nala = variant == "nala"
        for size, (embed_dims, depths, heads, drop) in dims.items():
            if size == "xtiny" and not nala:
                continue
            projection = 1024 if family != "mavit" else 2560 if size == "large" else 2048
            why = "" if nala or size not in published[family] else _GATE
            if nala:
                why = {
                    "tiny": "the released size has mlp ratio 4, the published numbers belong to 3.5",
                    "xtiny": "no explanation found: the released configuration is smaller than the published one",
                }.get(size, "")
            out.append(
                Size(
                    name=f"{family}_{size}",
                    label=f"{label}-{_SHORT[size]}",
                    skeleton="hierarchy",
                    paper=paper,
                    pooled=projection,
                    softmax_blocks=f"stages 3–4 ({sum(depths[2:])} of {sum(depths)} blocks)",
                    published=published[family].get(size, (None, None)),
                    why=why,
                    args={
                        "variant": variant,
                        "nala": nala,
                        "flags": "llvv",
                        "embed_dims": embed_dims,
                        "depths": depths,
                        "num_heads": heads,
                        "mlp_ratios": (4.0,) * 4 if nala and size in ("tiny", "base") else (3.5,) * 4,
                        "projection": projection,
                        "layer_scale": scale.get(size, (1, 1, 1, 1)),
                        "drop_path_rate": drop,
                    },
                )
            )
    return out


_POLA = ("pola", "Pola", "pola", "Meng et al. 2025, arXiv 2501.15061")
_FLATTEN = ("flatten", "FLatten", "focused", "Han et al. 2023, arXiv 2308.00442")
_INLINE = ("inline", "InLine", "inline", "Han et al. 2024, arXiv 2412.06590")


def _pyramids() -> list[Size]:
    depths = {"tiny": (2, 2, 2, 2), "small": (3, 4, 6, 3), "medium": (3, 4, 18, 3), "large": (3, 8, 27, 3)}
    published = {"tiny": (12.0, 2.0), "small": (21.6, 3.9), "medium": (37.6, 6.9), "large": (50.2, 10.2)}
    out = []
    for family, label, variant, paper in (_POLA, _FLATTEN, _INLINE):
        for size, depth in depths.items():
            if family == "pola" and size in ("medium", "large"):
                continue
            heads = (2, 4, 10, 16) if family == "inline" else (1, 2, 5, 8)
            drop = 0.1 if size in ("tiny", "small") else 0.3
            args = {
                "variant": variant,
                "flags": "llll",
                "embed_dims": (64, 128, 320, 512),
                "depths": depth,
                "num_heads": heads,
                "mlp_ratios": (8, 8, 4, 4),
                "drop_path_rate": drop,
            }
            out.append(
                Size(
                    name=f"{family}_pvt_{size}",
                    label=f"{label}-PVT-{_SHORT[size]}",
                    skeleton="pvt",
                    paper=paper,
                    pooled=512,
                    published=published[size] if family == "inline" else (None, None),
                    why="likely a misprint" if (family, size) == ("inline", "large") else "",
                    args=args,
                )
            )
    return out


def _swins() -> list[Size]:
    shapes = {
        "tiny": (96, (2, 2, 6, 2), (3, 6, 12, 24), 0.2),
        "small": (96, (2, 2, 18, 2), (3, 6, 12, 24), 0.3),
        "base": (128, (2, 2, 18, 2), (4, 8, 16, 32), 0.5),
    }
    published = {
        ("flatten", "tiny"): (29, 4.5), ("inline", "tiny"): (30, 4.5), ("inline", "small"): (50, 8.7),
        ("inline", "base"): (88, 15.4),
    }  # fmt: skip
    out = []
    for family, label, variant, paper in (_POLA, _FLATTEN, _INLINE):
        for size, (width, depths, heads, drop) in shapes.items():
            flags: Any = "llss"
            softmax = f"stages 3–4 ({sum(depths[2:])} of {sum(depths)} blocks)"
            if (family, size) == ("inline", "tiny"):
                flags, softmax = "llls", "stage 4 (2 of 12 blocks)"
            elif (family, size) == ("inline", "base"):
                flags = ["l", "l", ["l"] * 2 + ["s"] * 16, "s"]
                softmax = "16 of 18 blocks of stage 3, stage 4 (18 of 24 blocks)"
            out.append(
                Size(
                    name=f"{family}_swin_{size}",
                    label=f"{label}-Swin-{_SHORT[size]}",
                    skeleton="swin",
                    paper=paper,
                    pooled=8 * width,
                    softmax_blocks=softmax,
                    published=published.get((family, size), (None, None)),
                    why="the published count is that of the all-linear model, rounded"
                    if (family, size) == ("inline", "tiny")
                    else "",
                    args={
                        "variant": variant,
                        "flags": flags,
                        "embed_dim": width,
                        "depths": depths,
                        "num_heads": heads,
                        "mlp_ratio": 4,
                        "window_size": 56,
                        "drop_path_rate": drop,
                    },
                )
            )
    return out


def _deits() -> list[Size]:
    return [
        Size(
            name=f"inline_deit_{size}",
            label=f"InLine-DeiT-{_SHORT[size]}",
            skeleton="deit",
            paper=_INLINE[3],
            pooled=width,
            img_size=pixels,
            published=published,
            args={
                "variant": "inline",
                "flags": "l",
                "embed_dim": width,
                "depth": 12,
                "num_heads": heads,
                "mlp_ratio": 4,
                "drop_path_rate": 0.1,
            },
        )
        for size, width, heads, pixels, published in (
            ("tiny", 192, 6, 224, (6.5, 1.1)),
            ("small", 320, 10, 288, (16.7, 5.0)),
            ("base", 384, 12, 448, (23.8, 17.2)),
        )
    ]


SIZES: dict[str, Size] = {s.name: s for s in (*_hierarchies(), *_pyramids(), *_swins(), *_deits())}


def timm_names() -> list[str]:
    """All names registered with timm: each size, and ``NAME_linear`` (every block linear) of those with softmax."""
    return [n for s in SIZES.values() for n in ((s.name,) if s.all_linear else (s.name, f"{s.name}_linear"))]


def size_of(name: str) -> tuple[Size, dict[str, Any]]:
    """(size, constructor arguments) of a registered name. Raises KeyError."""
    linear = name.endswith("_linear") and name not in SIZES
    size = SIZES[name.removesuffix("_linear") if linear else name]
    return size, {**size.args, "img_size": size.img_size, **({"flags": "llll"} if linear else {})}


def clip_names() -> dict[str, str]:
    """timm name -> name of the CLIP model with this tower."""
    linear = "-linear"
    return {n: f"{size_of(n)[0].label}{linear if n not in SIZES else ''}-CLIP" for n in timm_names()}


def clip_configs() -> dict[str, dict[str, Any]]:
    """OpenCLIP configs of CLIP models with these image towers, by name (``MAViT-S-CLIP``, ``MAViT-S-linear-CLIP``).

    The text tower is ViT-B-16's, for tiny and small ones its narrower form (width 384, as ViT-S-16 has it).
    """
    out = {}
    for name, clip_name in clip_names().items():
        size, _ = size_of(name)
        narrow = size.label.endswith(("-T", "-XT", "-S"))
        width, heads = (384, 6) if narrow else (512, 8)
        out[clip_name] = {
            "embed_dim": width,
            "vision_cfg": {
                "timm_model_name": name,
                "timm_model_pretrained": False,
                "timm_pool": "token" if size.skeleton == "deit" else "avg",
                "timm_proj": "linear",
                "image_size": size.img_size,
            },
            "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": width, "heads": heads, "layers": 12},
        }
    return out
