"""What the backbone tests share: one tiny size per family, registered like the real ones."""

from dataclasses import replace
from typing import Any

from clip_linear.backbones import register, sizes

_HIERARCHY = {
    "embed_dims": (16, 16, 32, 32), "depths": (1, 1, 2, 1), "num_heads": (2, 2, 4, 4), "mlp_ratios": (2,) * 4,
    "projection": 24, "layer_scale": (1, 1, None, 1), "drop_path_rate": 0.0,
}  # fmt: skip
_PVT = {
    "embed_dims": (16, 16, 32, 32), "depths": (1,) * 4, "num_heads": (1, 2, 2, 4), "mlp_ratios": (2,) * 4,
    "drop_path_rate": 0.0,
}  # fmt: skip
_SWIN = {"embed_dim": 16, "depths": (1, 2, 1, 1), "num_heads": (2, 2, 4, 4), "mlp_ratio": 2, "drop_path_rate": 0.0}
_DEIT = {"embed_dim": 32, "depth": 3, "num_heads": 2, "mlp_ratio": 2, "drop_path_rate": 0.0}
_TINY = {
    "mavit_tiny": _HIERARCHY, "ravlt_tiny": _HIERARCHY, "nalaformer_tiny": _HIERARCHY, "pola_pvt_tiny": _PVT,
    "flatten_pvt_tiny": _PVT, "inline_pvt_tiny": _PVT, "pola_swin_tiny": _SWIN, "flatten_swin_tiny": _SWIN,
    "inline_swin_tiny": _SWIN, "inline_deit_tiny": _DEIT,
}  # fmt: skip
PIXELS = 64
TOYS = [f"toy_{name.removesuffix('_tiny')}" for name in _TINY]
for _toy, (_name, _args) in zip(TOYS, _TINY.items()):
    _size = sizes.SIZES[_name]
    sizes.SIZES[_toy] = replace(_size, name=_toy, label=_toy, img_size=PIXELS, args={**_size.args, **_args})


def clip_config(toy: str, **vision: Any) -> dict[str, Any]:
    """An OpenCLIP config of a tiny CLIP with this tower."""
    register()
    pool = "token" if "deit" in toy else "avg"
    tower = {"timm_model_name": toy, "timm_pool": pool, "timm_proj": "linear", "image_size": PIXELS, **vision}
    text = {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    return {"embed_dim": 16, "vision_cfg": tower, "text_cfg": text}
