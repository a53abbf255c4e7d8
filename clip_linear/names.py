"""Model names and configs: ``NAME+IMAGE[+TEXT]``, OpenCLIP's JSON configs, and the ``linear_attn`` key in them.

Nothing here imports torch or open_clip: plans over thousands of runs resolve their models with this module alone.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

from clip_linear.backbones.sizes import clip_configs
from clip_linear.errors import UserError, unknown
from clip_linear.registry import check_options, declaration, list_variants

KEY = "linear_attn"
TOWERS = {"image": "vision_cfg", "text": "text_cfg"}
_PRESETS = ("core", "paper")
_SPEC_KEYS = ("kind", "preset", "dress", "layers", "options")


@functools.cache
def _config_files() -> dict[str, Path]:
    package = importlib.util.find_spec("open_clip")
    if package is None or not package.submodule_search_locations:
        raise UserError("open_clip is not installed; run: pip install 'open_clip_torch>=3.3'")
    folder = Path(package.submodule_search_locations[0]) / "model_configs"
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def known_models() -> list[str]:
    """Names of OpenCLIP's built-in model configs, then of ours with the papers' backbones."""
    return [*_config_files(), *clip_configs()]


def parse_spec(spec: str | dict[str, Any], tower: str | None = None) -> dict[str, Any]:
    """``"mala"``, ``"mala.paper"`` or a ``linear_attn`` dict as a complete, validated dict.

    Its keys are kind, preset, and dress, layers, options where they say anything. Raises UserError, with the nearest
    names, for unknown keys, variants, presets, dress parts and options, and for a tower the variant has no form for.
    """
    if isinstance(spec, str):
        kind, dot, preset = spec.partition(".")
        spec = {"kind": kind, "preset": preset if dot else "core"}
    if not isinstance(spec, dict):
        raise UserError(f"{KEY} is {spec!r}; write a variant's name or a dict with a key 'kind'")
    strange = [k for k in spec if k not in _SPEC_KEYS]
    if strange:
        raise unknown(f"key in {KEY}", strange[0], _SPEC_KEYS, f"a {KEY} config has: {', '.join(_SPEC_KEYS)}")
    kind, preset = str(spec.get("kind")), spec.get("preset", "core")
    if kind not in list_variants():
        raise unknown("variant", kind, list_variants(), "run: clip-linear list")
    if preset not in _PRESETS:
        raise unknown("preset", str(preset), _PRESETS, f"write {kind}.core or {kind}.paper")
    known = declaration(kind)
    if tower is not None and tower not in known.info.towers:
        raise UserError(f"variant {kind!r} has no form for the {tower} tower; run: clip-linear list")
    out: dict[str, Any] = {"kind": kind, "preset": preset}
    for key, empty in (("dress", {}), ("layers", "all"), ("options", {})):
        value = spec.get(key, empty)
        if value not in (empty, None):
            out[key] = value
    for key in ("dress", "options"):
        if not isinstance(out.get(key, {}), dict):
            raise UserError(f"{key} of {KEY} is {out[key]!r}; write a dict")
    known.dress(preset, out.get("dress", {}))
    check_options(kind, tuple(known.info.options), out.get("options", {}))
    return out


def split_name(name: str) -> tuple[str, str | None, str | None]:
    """``NAME+IMAGE[+TEXT]`` → (NAME, IMAGE or None, TEXT or None). Raises UserError for more parts or empty ones."""
    base, *parts = name.split("+")
    if len(parts) > 2 or not base or any(not p for p in parts):
        raise UserError(f"model name {name!r} is not NAME+IMAGE[+TEXT], e.g. ViT-B-16+mala or ViT-B-16+mala+elu")
    return base, parts[0] if parts else None, parts[1] if len(parts) == 2 else None


def with_variants(config: dict[str, Any], image: Any = None, text: Any = None) -> dict[str, Any]:
    """A copy of a model config whose towers carry the given specs; None leaves a tower as it is."""
    config = copy.deepcopy(config)
    for tower, spec in (("image", image), ("text", text)):
        if spec is not None:
            config[TOWERS[tower]][KEY] = parse_spec(spec, tower)
    return config


def tower_spec(config: dict[str, Any], tower: str) -> dict[str, Any] | None:
    """The validated ``linear_attn`` spec of a tower of a model config, or None where it is untouched."""
    spec = (config.get(TOWERS[tower]) or {}).get(KEY)
    return None if spec is None else parse_spec(spec, tower)


def variant_label(config: dict[str, Any], tower: str) -> str:
    """The variant of a tower as rows and tables name it: ``mala``, ``mala.paper``, or ``none`` (untouched)."""
    spec = tower_spec(config, tower)
    if spec is None:
        return "none"
    return spec["kind"] if spec["preset"] == "core" else f"{spec['kind']}.{spec['preset']}"


def model_config(model: str) -> tuple[str, dict[str, Any]]:
    """Resolve what ``--model`` may hold: a name, ``NAME+IMAGE[+TEXT]``, or ``PATH.json[+IMAGE[+TEXT]]``.

    Returns (the name under which OpenCLIP shall know it, its config). Paths inside the config (a tokenizer's
    ``bpe_path``) are made absolute relative to the config's folder. Raises UserError.
    """
    base, image, text = split_name(model)
    if base.endswith(".json"):
        stem, config = _read_config(Path(base))
        name = "+".join(p for p in (stem, image, text) if p)
    else:
        files = _config_files()
        key = base.replace("/", "-")
        ours = {} if key in files else clip_configs()
        if key not in files and key not in ours:
            raise unknown("model", base, known_models(), "run: clip-linear list models")
        config, name = ours.get(key) or json.loads(files[key].read_text()), model
    return name, with_variants(config, image, text)


_SIZES = (
    "embed_dim", "image_size", "patch_size", "width", "head_width", "layers", "heads", "context_length", "vocab_size",
)  # fmt: skip


def _check_sizes(path: Path, config: Any, where: str) -> None:
    """Raise UserError for a size that is no whole number above 0, and for heads that do not divide the width."""
    if not isinstance(config, dict):
        raise UserError(f"model config {str(path)!r}: {where} must be a JSON object, not {config!r}")
    for key in _SIZES:
        parts = config.get(key, 1) if isinstance(config.get(key), list) else [config.get(key, 1)]
        if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in parts):
            raise UserError(
                f"model config {str(path)!r}: {key} {config[key]!r} in {where} must be a whole number above 0"
            )
    width = config.get("width", 0)
    per_head, heads = config.get("head_width", 1), config.get("heads", 1)
    if isinstance(config.get("layers", 0), int) and (width % per_head or width % heads):
        raise UserError(
            f"model config {str(path)!r}: width {width} in {where} is no multiple of its heads' width or number"
        )


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"model config {str(path)!r} does not exist; give the path of an OpenCLIP JSON config"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"model config {str(path)!r} is not valid JSON ({error})") from None
    missing = [k for k in ("embed_dim", "vision_cfg", "text_cfg") if not isinstance(config, dict) or k not in config]
    if missing:
        raise UserError(
            f"model config {str(path)!r} lacks {', '.join(missing)}; "
            "an OpenCLIP config has embed_dim, vision_cfg and text_cfg"
        )
    known = _config_files().get(path.stem)
    if known is not None and json.loads(known.read_text()) != config:
        raise UserError(
            f"model config {str(path)!r} has the name of OpenCLIP's built-in {path.stem!r} but differs from it; "
            "rename the file"
        )
    for tower, key in TOWERS.items():
        _check_sizes(path, config[key], key)
        tower_spec(config, tower)
    _check_sizes(path, config, "the config")
    settings = (config["text_cfg"] or {}).get("tokenizer_kwargs") or {}
    if "bpe_path" in settings:
        settings["bpe_path"] = str((path.parent / settings["bpe_path"]).resolve())
    return path.stem, config
