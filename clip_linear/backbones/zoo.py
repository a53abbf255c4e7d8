"""Building registered sizes, and making them known to timm."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from clip_linear.backbones.deit import PlainViT
from clip_linear.backbones.hierarchy import Hierarchy
from clip_linear.backbones.pvt import Pyramid
from clip_linear.backbones.sizes import size_of, timm_names
from clip_linear.backbones.swin import Windowed
from clip_linear.errors import UserError, unknown

_CLASSES: dict[str, type[nn.Module]] = {
    "hierarchy": Hierarchy,
    "pvt": Pyramid,
    "swin": Windowed,
    "deit": PlainViT,
}
__all__: list[str] = []  # timm's registry adds the names it is given


def build(name: str, **overrides: Any) -> nn.Module:
    """A registered size (``mavit_tiny``, ``mavit_tiny_linear``, …); overrides are the skeleton's arguments.

    Raises UserError for an unknown name or argument.
    """
    if name not in timm_names():
        raise unknown("backbone", name, timm_names(), "run: clip-linear list backbones")
    size, args = size_of(name)
    cls = _CLASSES[size.skeleton]
    try:
        model = cls(**{**args, **overrides})
    except TypeError as error:
        raise UserError(f"backbone {name!r}: {error}") from None
    model.default_cfg["architecture"] = name  # type: ignore[operator,index,assignment]
    return model


def register() -> None:
    """Make every size known to ``timm.create_model``; calling it again does nothing."""
    import timm
    from timm.models import register_model

    for name in timm_names():
        if not timm.is_model(name):
            entry = _entry(name)
            setattr(sys.modules[__name__], name, entry)
            register_model(entry)


def _entry(name: str) -> Callable[..., nn.Module]:
    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        if pretrained:
            raise UserError(
                f"no weights of {name} can be downloaded; convert a released file: clip-linear convert official FILE"
            )
        for timms_own in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
            kwargs.pop(timms_own, None)
        features_only, indices = kwargs.pop("features_only", False), kwargs.pop("out_indices", None)
        if not features_only:
            return build(name, **kwargs)
        from timm.models._features import FeatureGetterNet

        model: Any = build(name, **kwargs | {"num_classes": 0})
        chosen = tuple(range(len(model.feature_info))) if indices is None else tuple(indices)
        return FeatureGetterNet(model, out_indices=chosen, prune=False)

    create.__name__ = create.__qualname__ = name
    create.__module__ = __name__
    return create
