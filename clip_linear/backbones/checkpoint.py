"""Released checkpoint files of the papers' backbones: what is in them, and into which of our models it goes."""

from __future__ import annotations

import argparse
import hashlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clip_linear.backbones.flags import mixed_flags
from clip_linear.backbones.official import load_official
from clip_linear.backbones.sizes import SIZES, size_of, timm_names
from clip_linear.backbones.trunk import Trunk, encode_variants
from clip_linear.backbones.zoo import build
from clip_linear.errors import UserError, unknown
from clip_linear.files import replacing
from clip_linear.marker import decode

_HOLDERS = ("model", "state_dict", "module")
_EMA_HOLDERS = ("model_ema", "state_dict_ema", "ema")


def read_weights(path: Path, ema: bool = False, allow_pickle: bool = False) -> dict[str, Tensor]:
    """The state dict in a released file (its own names, ``module.`` taken off); ``ema``: the averaged weights.

    Files are read with torch's weights-only unpickler, to which argparse.Namespace is allowed (it is harmless).
    ``allow_pickle`` reads other objects too, which runs any code that the file holds. Raises UserError.
    """
    holders = _EMA_HOLDERS if ema else _HOLDERS
    content = _read(path, allow_pickle)
    found = next((content[k] for k in holders if isinstance(content.get(k), dict)), None)
    if found is None and ema:
        raise UserError(f"{path} has no averaged weights ({', '.join(_EMA_HOLDERS)}); it has: {_some(content)}")
    state = {k: v for k, v in (content if found is None else found).items() if isinstance(v, Tensor)}
    if not state:
        raise UserError(f"{path} holds no weights under {', '.join(holders)}; it has: {_some(content)}")
    return {k.removeprefix("module."): v for k, v in state.items()}


def _read(path: Path, allow_pickle: bool) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path} does not exist; give a released checkpoint (.pth, .pt or .safetensors)")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return dict(load_file(path))
        except SafetensorError as error:
            raise UserError(f"{path} is no safetensors file: {error}") from error
    with path.open("rb") as file:
        if file.read(1) not in (b"P", b"\x80"):  # zip archives, and the pickles of old torch versions
            raise UserError(f"{path} is no checkpoint that torch can read; download it again")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except ModuleNotFoundError as error:
        raise UserError(f"{path} holds objects of a package that is not installed: {error}; install it") from error
    except pickle.UnpicklingError as error:
        what = str(error).partition("GLOBAL ")[2].split(" ")[0] or "other objects than tensors"
        raise UserError(
            f"{path} holds pickled {what}, and loading such objects can run any code, so torch's weights_only mode "
            "refuses; if you trust where the file comes from, add --allow-pickle"
        ) from error
    except (RuntimeError, EOFError, KeyError, ValueError) as error:
        raise UserError(f"{path} is no checkpoint that torch can read; download it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not a dict of weights")
    return content


def _some(content: dict[str, Any]) -> str:
    names = [str(k) for k in content]
    return ", ".join(names[:8]) + (" …" if len(names) > 8 else "") or "nothing"


def convert(arch: str, state: dict[str, Tensor], flags: str | None = None, image_size: int | None = None) -> Trunk:
    """Our model with released weights, and with as many classes as they have.

    ``flags``: a letter per stage (l or i linear, v or s softmax, ``IIMS2``: see mixed_flags). The conv-stem families
    must be told: their weights fit every choice. Raises UserError.
    """
    if arch not in timm_names():
        raise unknown("backbone", arch, timm_names(), "run: clip-linear list backbones")
    size, args = size_of(arch)
    changes: dict[str, Any] = {}
    if flags is None and size.skeleton == "hierarchy" and arch in SIZES:
        raise UserError(
            f"{arch}: the weights do not tell which blocks are softmax; say --flags llvv (as released, "
            "softmax in stages 3 and 4), --flags llll (all-linear), or what the model was trained with"
        )
    if flags is not None:
        changes["flags"] = mixed_flags(flags, args["depths"] if "depths" in args else [args["depth"]])
    if image_size is not None and size.skeleton != "swin":
        changes["img_size"] = image_size
    head = state.get("head.weight")
    model: Any = build(arch, **changes, num_classes=0 if head is None else head.shape[0])
    if image_size is not None and size.skeleton == "swin":
        model.set_input_size(image_size)
    load_official(model, state)
    return model


def write(path: Path, model: Trunk, origin: dict[str, Any]) -> None:
    """Write a converted model (``{"state_dict": …}``, which timm's ``checkpoint_path`` takes) and where it is from."""
    with replacing(path) as tmp:
        torch.save(
            {
                "state_dict": model.state_dict(),
                "blocks": decode(encode_variants(model.block_variants())),
                "image_size": list(model.img_size),
                **origin,
            },
            tmp,
        )


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
