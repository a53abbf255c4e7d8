"""Models to evaluate: names, configs, run folders, checkpoints of ours and OpenCLIP's, and functions of the user."""

from __future__ import annotations

import glob
import importlib
import json
import logging
import os
import re
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_linear.errors import RunError, UserError, unknown

if TYPE_CHECKING:
    from torch import nn

RANDOM = "random"  # --pretrained random: untrained weights, on purpose
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_WEIGHTS = (".pt", ".pth", ".bin", ".safetensors", ".npz", ".npy")


@dataclass(kw_only=True)
class Loaded:
    """A model ready to evaluate; ``info`` holds its columns of a row."""

    model: nn.Module
    preprocess: Callable[[Any], Any]
    tokenizer: Any
    info: dict[str, Any] = field(default_factory=dict)


def expand(pretrained: list[str] | None) -> list[str | None]:
    """The checkpoints that ``--pretrained`` names: patterns and ``checkpoints`` folders become their files, in order
    of their numbers. Raises UserError for a pattern without files."""
    if not pretrained:
        return [None]
    out: list[str] = []
    for text in pretrained:
        path = Path(text)
        if any(c in text for c in "*?[") and not path.exists():
            found = [f for f in glob.glob(text, recursive=True) if f.endswith(_WEIGHTS)]
        elif path.is_dir() and not (path / "open_clip_config.json").is_file():
            found = [str(f) for f in path.iterdir() if f.suffix in _WEIGHTS]
        else:
            out.append(text)
            continue
        if not found:
            raise UserError(f"--pretrained {text!r} matches no checkpoint ({', '.join(_WEIGHTS)})")
        out += sorted(found, key=_natural)
    return list(out)


def _natural(text: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def load(model: str | None, pretrained: str | None, *, precision: str = "fp32", device: str = "cpu") -> Loaded:
    """Load what ``--model`` and ``--pretrained`` name.

    ``model``: an OpenCLIP name, NAME+IMAGE+TEXT, a JSON config, ``local-dir:RUN``, ``hf-hub:…``, or
    ``module:function`` (called without arguments, returns model, preprocess, tokenizer); may be left out where the
    weights lie in a run folder. ``pretrained``: a run folder, a file, one of OpenCLIP's tags, or ``random``. Raises
    UserError for names and files that do not fit together, RunError where weights cannot be fetched.
    """
    if model and _FUNCTION.fullmatch(model):
        return _from_function(model, device)
    run = _run_folder(model, pretrained)
    if run is not None and (model is None or model.startswith("local-dir:")):
        return _from_run(run, _file(pretrained), precision, device)
    if model is None:
        where = f", and {pretrained!r} does not lie in a run folder that could tell it" if pretrained else ""
        raise UserError(f"--model is missing{where}; give --model NAME, or --pretrained with a run folder")
    if run is not None and pretrained and Path(pretrained.removeprefix("local-dir:")).is_dir():
        pretrained = str(_weights_of(run))
    if pretrained is None and ":" not in model:
        raise UserError(
            f"no --pretrained: the weights of {model!r} would be random; give a checkpoint, a run folder, a tag, "
            f"or {RANDOM} if that is meant"
        )
    return _build(model, None if pretrained == RANDOM else pretrained, precision, device)


def _file(pretrained: str | None) -> Path | None:
    path = Path((pretrained or "").removeprefix("local-dir:"))
    return path if pretrained and path.is_file() else None


def _run_folder(model: str | None, pretrained: str | None) -> Path | None:
    """The folder with ``open_clip_config.json`` that either argument points to or into."""
    for text in (pretrained, model):
        path = Path((text or "").removeprefix("local-dir:"))
        if not text or not path.exists() or path.suffix == ".json":
            continue
        for folder in (path, path.parent, path.parent.parent):
            if (folder / "open_clip_config.json").is_file():
                return folder
    return None


def _weights_of(run: Path) -> Path:
    found = [p for p in (run / "open_clip_model.safetensors", run / "open_clip_pytorch_model.bin") if p.is_file()]
    if not found:
        raise UserError(f"run {str(run)!r} holds no open_clip_model.safetensors: OpenCLIP would use random weights")
    return found[0]


def _from_run(run: Path, checkpoint: Path | None, precision: str, device: str) -> Loaded:
    import open_clip

    from clip_linear.openclip import register

    register()
    weights = checkpoint or _weights_of(run)
    name = f"local-dir:{run}"
    made = _quiet(
        lambda: open_clip.create_model_and_transforms(
            name, load_weights=False, precision=precision, device=device, pretrained_text=False
        ),
        name,
    )
    _load_weights(made[0], weights, name)
    config = json.loads((run / "open_clip_config.json").read_text())["model_cfg"]
    return Loaded(
        model=made[0],
        preprocess=made[2],
        tokenizer=_quiet(lambda: open_clip.get_tokenizer(name, **_vocabulary(run, config)), name),
        info=_with_total(
            _info(made[0], str(run), config) | {"pretrained": str(weights)} | _run_columns(run) | _progress(weights)
        ),
    )


def _vocabulary(run: Path, config: dict[str, Any]) -> dict[str, str]:
    """The run's own copy of its vocabulary, where the file that it was trained with is no longer in its place."""
    path = Path((config["text_cfg"].get("tokenizer_kwargs") or {}).get("bpe_path", "."))
    copy = run / path.name
    return {"bpe_path": str(copy)} if not path.exists() and copy.is_file() else {}


def _build(model: str, pretrained: str | None, precision: str, device: str) -> Loaded:
    import open_clip

    from clip_linear.factory import known_name

    name = known_name(model)
    path = Path(pretrained) if pretrained and Path(pretrained).is_file() else None
    if pretrained and path is None and ":" not in name:
        tags = open_clip.list_pretrained_tags_by_model(name.split("+")[0])
        if pretrained not in tags:
            raise unknown(
                "pretrained weights", pretrained, [*tags, RANDOM], f"give a file, a run folder or a tag of {name}"
            )
    made = _quiet(
        lambda: open_clip.create_model_and_transforms(
            name, pretrained=None if path else pretrained, precision=precision, device=device
        ),
        name,
    )
    if path:
        _load_weights(made[0], path, name)
    config = open_clip.get_model_config(name) if ":" not in name else {}
    info = _info(made[0], name, config or {}) | {"pretrained": pretrained or RANDOM}
    return Loaded(
        model=made[0],
        preprocess=made[2],
        tokenizer=_quiet(lambda: open_clip.get_tokenizer(name), name),
        info=_with_total(info | (_progress(path) if path else {})),
    )


def _quiet(make: Callable[[], Any], name: str) -> Any:
    """OpenCLIP logs every step of building and turns failures into RuntimeErrors of its own."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        return make()
    except UserError:
        raise
    except (RuntimeError, OSError, ValueError) as error:
        raise RunError(f"model {name!r} could not be built: {_line(error)}") from error
    finally:
        root.setLevel(level)


def _load_weights(model: Any, path: Path, name: str) -> None:
    import pickle

    import open_clip
    from safetensors import SafetensorError

    try:
        open_clip.load_checkpoint(model, str(path))
    except UserError:
        raise
    except (
        RuntimeError,
        AssertionError,  # OpenCLIP's check of the text tower's width
        KeyError,
        EOFError,
        OSError,
        pickle.UnpicklingError,
        SafetensorError,
        AttributeError,
    ) as error:
        hint = ""
        if "clip_linear_spec" in str(error):
            hint = "; it was trained with linear attention: add its variants (+IMAGE+TEXT), or leave out --model"
        raise UserError(
            f"checkpoint {str(path)!r} does not fit model {name!r} or is damaged: {_line(error)}{hint}"
        ) from None


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) < 300 else text[:297] + "…"


def _from_function(text: str, device: str) -> Loaded:
    module_name, function = text.split(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name not in (module_name, module_name.split(".")[0]):
            raise
        raise UserError(f"--model {text!r}: there is no module {module_name!r} here or on PYTHONPATH") from None
    if not callable(getattr(module, function, None)):
        raise UserError(f"--model {text!r}: module {module_name!r} has no function {function!r}")
    made = getattr(module, function)()
    if not isinstance(made, tuple) or len(made) != 3:
        raise UserError(f"--model {text!r} must return (model, preprocess, tokenizer), not {type(made).__name__}")
    model, preprocess, tokenizer = made
    return Loaded(
        model=model.to(device), preprocess=preprocess, tokenizer=tokenizer, info={"model": text, "pretrained": text}
    )


def _info(model: Any, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The row's columns that say what a model is; ``config`` is its OpenCLIP config, empty where that is not known."""
    from clip_linear.names import variant_label
    from clip_linear.profile import profile

    try:
        costs = profile(config) if config else None
    except UserError:  # a tower that only its own library can count, e.g. Hugging Face's
        costs = None
    if costs is None:
        return {"model": name, "n_params_total": sum(p.numel() for p in model.parameters())}
    return {
        "model": name,
        "image_variant": variant_label(config, "image"),
        "text_variant": variant_label(config, "text"),
        "n_params_vision": costs.n_params_vision,
        "n_params_text": costs.n_params_text,
        "n_params_embedding": costs.n_params_embedding,
        "n_params_total": costs.n_params_total,
        "gmacs": costs.gmacs,
    }


def _run_columns(run: Path) -> dict[str, Any]:
    """Run id, model name and seed from the run's config.toml, and the samples seen once it is done."""
    columns: dict[str, Any] = {"run_id": run.resolve().name}
    if (run / "config.toml").is_file():
        table = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
        columns |= {"run_id": table.get("run_id"), "model": table.get("model")}
        columns["seed"] = table.get("openclip", {}).get("seed")
    if (run / "done.json").is_file():
        columns["samples_seen"] = json.loads((run / "done.json").read_text(encoding="utf-8")).get("samples_seen")
    return columns


def _progress(path: Path) -> dict[str, Any]:
    """Samples seen, as our checkpoints record them."""
    if path.suffix != ".pt":
        return {}
    import torch

    checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    seen = checkpoint.get("samples_seen") if isinstance(checkpoint, dict) else None
    return {"samples_seen": None if seen is None else int(seen)}


def _with_total(info: dict[str, Any]) -> dict[str, Any]:
    """Add the compute of all forward passes where both factors are known."""
    gmacs, seen = info.get("gmacs"), info.get("samples_seen")
    return info | ({} if gmacs is None or seen is None else {"gmacs_total": gmacs * seen})
