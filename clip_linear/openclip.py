"""``register()``: OpenCLIP learns the ``linear_attn`` config key and the names ``NAME+IMAGE[+TEXT]``.

The model classes' ``__init__`` is wrapped once. That covers every way to build a model (create_model, hf-hub:,
local-dir:, CLIP_benchmark, direct construction); a model without the key is built by the untouched original.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from typing import Any

from clip_linear.errors import UserError
from clip_linear.names import KEY, TOWERS, split_name, with_variants

_DONE = "_clip_linear"


def register() -> None:
    """Teach OpenCLIP in this process; calling it again does nothing. Unswapped models stay bit-identical."""
    import open_clip
    from open_clip import coca_model, factory, model

    hub: Any = importlib.import_module("open_clip.push_to_hf_hub")  # its name in the package is a function of it

    from clip_linear import backbones
    from clip_linear.backbones.sizes import clip_configs

    for cls in (model.CLIP, model.CustomTextCLIP, coca_model.CoCa):
        if not hasattr(cls.__init__, _DONE):
            cls.__init__ = _with_swap(cls.__init__)
    if not hasattr(factory.get_model_config, _DONE):
        wrapped = _with_names(factory.get_model_config)
        modules: tuple[Any, ...] = (factory, open_clip, hub)
        for module in modules:
            module.get_model_config = wrapped
        factory.get_pretrained_cfg = _with_base_tags(factory.get_pretrained_cfg)
        backbones.register()
        for name, config in clip_configs().items():
            factory._MODEL_CONFIGS.setdefault(name, config)


def _with_swap(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind_partial(self, *args, **kwargs).arguments
        given.update(given.pop("kwargs", {}))
        given.pop("self")
        specs = {}
        for tower, name in TOWERS.items():
            given[name], specs[tower] = _take(given.get(name))
        if not any(specs.values()):
            original(self, *args, **kwargs)
            return _fit_image_size(self)
        original(self, **given)
        _fit_image_size(self)
        from clip_linear.towers import swap_attention

        swap_attention(self, **specs)

    setattr(__init__, _DONE, True)
    return __init__


def _fit_image_size(model: Any) -> None:
    """Tell our backbones the config's image size: OpenCLIP does not hand it on to timm."""
    from clip_linear.backbones.trunk import Trunk

    visual = getattr(model, "visual", None)
    trunk = getattr(visual, "trunk", None)
    if isinstance(trunk, Trunk) and trunk.img_size != tuple(visual.image_size):  # type: ignore[union-attr]
        trunk.set_input_size(visual.image_size)  # type: ignore[union-attr]


def _take(config: Any) -> tuple[Any, Any]:
    """Take the key out of a copy of a sub-config."""
    if not isinstance(config, dict) or KEY not in config:
        return config, None
    config = copy.copy(config)
    return config, config.pop(KEY)


def _with_names(original: Any) -> Any:
    @functools.wraps(original)
    def get_model_config(model_name: str) -> dict[str, Any] | None:
        config = original(model_name)
        if config is not None or "+" not in model_name or ":" in model_name:
            return config
        base, image, text = split_name(model_name)
        config = original(base) or original(base.replace("/", "-"))
        return None if config is None else with_variants(config, image, text)

    setattr(get_model_config, _DONE, True)
    return get_model_config


def _with_base_tags(original: Any) -> Any:
    @functools.wraps(original)
    def get_pretrained_cfg(model: str, tag: str) -> dict[str, Any]:
        return original(model, tag) or original(model.split("+")[0], tag)

    return get_pretrained_cfg


def add_config(name: str, config: dict[str, Any]) -> None:
    """Make a resolved config known to OpenCLIP under a name (``add_model_config`` without a file).

    Raises UserError when another config already has this name.
    """
    from open_clip import factory

    known = factory._MODEL_CONFIGS.get(name)
    if known is not None and known != config:
        raise UserError(f"model name {name!r} already belongs to another config in this process; rename the file")
    factory._MODEL_CONFIGS[name] = copy.deepcopy(config)
