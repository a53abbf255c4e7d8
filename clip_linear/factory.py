"""OpenCLIP's factory functions for our names and configs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from clip_linear import marker
from clip_linear.errors import UserError
from clip_linear.names import model_config
from clip_linear.openclip import add_config, register


def known_name(model: str) -> str:
    """Register everything and return the name under which OpenCLIP builds ``model``.

    ``model`` is what ``--model`` may hold: a name, ``NAME+IMAGE[+TEXT]``, ``PATH.json[+IMAGE[+TEXT]]``, or one of
    OpenCLIP's ``local-dir:`` / ``hf-hub:`` sources (passed on as they are). Raises UserError.
    """
    register()
    if ":" in model:
        return model
    import open_clip

    if open_clip.get_model_config(model) is not None:  # built in, or added with add_model_config
        return model
    name, config = model_config(model)
    name = name.replace("/", "-")
    add_config(name, config)
    return name


@contextlib.contextmanager
def misspelt_keys(model: str) -> Iterator[None]:
    """OpenCLIP's TypeError for a key of a config that it does not know, as UserError."""
    try:
        yield
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        key = str(error).rsplit(" ", 1)[-1]
        raise UserError(f"the config of {model} has {key}, which OpenCLIP does not know there; correct it") from error


def weights_of(pretrained: str) -> str:
    """The weights in a run's folder, where --pretrained names one; else what was given."""
    inside = Path(pretrained) / "open_clip_model.safetensors"
    return str(inside) if pretrained and inside.is_file() else pretrained


@contextlib.contextmanager
def weights_that_fit(model: str, pretrained: str) -> Iterator[None]:
    """What OpenCLIP raises for a checkpoint of another model, as UserError."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if isinstance(error, RuntimeError) and "state_dict" not in str(error):
            raise
        if marker.NAME in str(error):
            why = "it was trained with linear attention: add its variants, --model NAME+IMAGE[+TEXT]"
        else:
            why = lines[min(1, len(lines) - 1)] if lines else type(error).__name__
        raise UserError(f"--pretrained {pretrained!r} does not fit {model}: {why}") from error


def create_model(name: str, pretrained: str | None = None, **openclip_kwargs: Any) -> nn.Module:
    """``open_clip.create_model`` after ``register()``. Raises UserError for names that are not known."""
    import open_clip

    with misspelt_keys(name):
        return open_clip.create_model(known_name(name), pretrained=pretrained, **openclip_kwargs)


def create_model_and_transforms(name: str, pretrained: str | None = None, **openclip_kwargs: Any) -> Any:
    """OpenCLIP's triple (model, preprocess_train, preprocess_val), after ``register()``. Raises UserError."""
    import open_clip

    with misspelt_keys(name):
        return open_clip.create_model_and_transforms(known_name(name), pretrained=pretrained, **openclip_kwargs)


def get_tokenizer(name: str, **openclip_kwargs: Any) -> Any:
    """``open_clip.get_tokenizer`` after ``register()``. Raises UserError for names that are not known."""
    import open_clip

    return open_clip.get_tokenizer(known_name(name), **openclip_kwargs)
