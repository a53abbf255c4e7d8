"""From a sweep to its runs: the grid's cells, each as the argv of ``clip-linear train`` and its run id."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clip_linear import names
from clip_linear.errors import UserError, unknown
from clip_linear.profile import Profile, profile
from clip_linear.train.config import resolve
from clip_linear_launch import spec
from clip_linear_launch.sweep import CELL_KEYS, Sweep, check_resources

_RESOURCES = set(spec.Resources.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a sweep, before anything is written."""

    run_id: str
    argv: tuple[str, ...]  # flags of `clip-linear train`, without --run-dir; relative paths start at the sweep file
    model: str  # NAME+IMAGE[+TEXT] as shown, NAME a config's stem
    base: str  # NAME
    image: str
    text: str
    samples: int
    global_batch: int
    steps: int
    seed: int
    tuning: dict[str, Any]  # which of per_model's alternatives this run has
    cell: str  # equal for runs that differ only in tuning: the best of them counts
    resources: spec.Resources
    size: Profile
    image_size: int | None  # of square images; None otherwise

    @property
    def gmacs_total(self) -> float:
        """Forward GMACs of one image and one text, times samples seen."""
        return self.size.gmacs * self.samples


def expand(sweep: Sweep) -> list[Run]:
    """All runs of a sweep, in the grid's order, each once. Raises UserError naming the cell that is wrong."""
    models = {str(m) for m in [*sweep.grid.get("model", []), *(r.get("model") for r in sweep.runs)] if m is not None}
    models |= {str(sweep.base["model"])} if "model" in sweep.base else set()
    for name in sweep.per_model:
        if name not in models and name not in {Path(m).stem for m in models if m.endswith(".json")}:
            raise unknown('model in [per_model."…"]', name, models, "name one of the grid's models")
        both = set(sweep.per_model[name]) & set(sweep.grid)
        if both:
            raise UserError(f'{", ".join(sorted(both))} is set in [grid] and in [per_model."{name}"]; keep one')
    found: dict[str, Run] = {}
    for cell in _cells(sweep):
        for tuning in _alternatives(sweep, cell):
            run = _run(sweep, cell, tuning)
            found.setdefault(run.run_id, run)
    if not found:
        raise UserError(f"{sweep.path.name} expands to no run; give [grid] or [[runs]] (and exclude less)")
    return list(found.values())


def _cells(sweep: Sweep) -> Iterator[dict[str, Any]]:
    cells = [dict(zip(sweep.grid, values)) for values in itertools.product(*sweep.grid.values())] if sweep.grid else []
    for cell in [*cells, *sweep.runs]:
        cell = sweep.head.budget | cell if not {"samples", "gmacs_total"} & set(cell) else cell
        if not any(_matches(cell, pattern) for pattern in sweep.exclude):
            yield cell


def _matches(cell: dict[str, Any], pattern: dict[str, Any]) -> bool:
    known = {"image": "none", "text": "same"} | cell
    return all(known.get(k) in (v if isinstance(v, list) else [v]) for k, v in pattern.items())


def _overrides(sweep: Sweep, cell: dict[str, Any]) -> dict[str, Any]:
    model = str(cell.get("model", sweep.base.get("model", "")))
    stem = Path(model).stem if model.endswith(".json") else model
    return sweep.per_model.get(model) or sweep.per_model.get(stem) or {}


def _alternatives(sweep: Sweep, cell: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every choice from the lists in a model's [per_model] table, e.g. several learning rates."""
    lists = {k: v for k, v in _overrides(sweep, cell).items() if isinstance(v, list) and k not in _RESOURCES}
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values))


def _run(sweep: Sweep, cell: dict[str, Any], tuning: dict[str, Any]) -> Run:
    over = _overrides(sweep, cell)
    settings = sweep.base | {k: v for k, v in over.items() if k not in _RESOURCES} | tuning | cell
    wanted = {k: v for k, v in (over | cell).items() if k in _RESOURCES}
    resources = sweep.resources
    if wanted:
        merged = {k: v for k, v in dataclasses.asdict(sweep.resources).items() if v is not None} | wanted
        resources = check_resources(spec.build(spec.Resources, merged, f"resources of {cell}"))
    if "model" not in settings:
        raise UserError('no model; give [grid] model = ["ViT-B-16", …]')
    shown, given = _model_name(sweep, settings)
    size = _size(given, settings.get("force-image-size"))
    flags = {k: v for k, v in settings.items() if k not in CELL_KEYS}
    flags |= {"model": given, "seed": settings.get("seed", 0)} | _budget(settings, size)
    try:
        config = resolve(_argv(flags), world_size=resources.world_size)
        if "gmacs_total" in settings:  # the nearest whole number of steps
            flags["samples"] = max(1, round(flags["samples"] / config.global_batch)) * config.global_batch
            config = resolve(_argv(flags), world_size=resources.world_size)
    except UserError as error:
        raise UserError(f"run {_words(cell)}: {error}") from None
    image, text = (names.variant_label(_config(given), tower) for tower in ("image", "text"))
    same = {k: v for k, v in settings.items() if k not in tuning} | {"model": given}
    return Run(
        run_id=config.run_id,
        argv=tuple(_argv(flags)),
        model=shown,
        base=names.split_name(shown)[0],
        image=image,
        text=text,
        samples=config.budget,
        global_batch=config.global_batch,
        steps=config.steps,
        seed=int(flags["seed"]),
        tuning=tuning,
        cell=hashlib.sha256(json.dumps(same, sort_keys=True, default=str).encode()).hexdigest()[:12],
        resources=resources,
        size=size,
        image_size=_square(settings.get("force-image-size", _config(given)["vision_cfg"].get("image_size", 224))),
    )


def _square(size: Any) -> int | None:
    return size if isinstance(size, int) else None


def _words(cell: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in cell.items()) or "of [base]"


def _model_name(sweep: Sweep, settings: dict[str, Any]) -> tuple[str, str]:
    """The model as shown (a config by its stem) and as ``--model`` gets it (a config by its absolute path)."""
    model, image = str(settings["model"]), str(settings.get("image", "none"))
    text = str(settings.get("text", "same"))
    text = image if text == "same" else text
    if image == "none" and text != "none":
        raise UserError(
            f'image = "none" with text = {text!r}: a text tower alone cannot be named; use image = "softmax"'
        )
    parts = "".join(f"+{p}" for p in (image, text) if p != "none")
    if parts and "+" in model:
        raise UserError(f"model {model!r} names its variants itself; leave image and text out, or name only the model")
    head, plus, tail = model.partition("+")
    if not head.endswith(".json"):
        return model + parts, model + parts
    path = (sweep.here / head).resolve()
    return path.stem + plus + tail + parts, str(path) + plus + tail + parts


@functools.lru_cache(maxsize=4096)
def _config(model: str) -> dict[str, Any]:
    return names.model_config(model)[1]


@functools.lru_cache(maxsize=4096)
def _size(model: str, image_size: Any) -> Profile:
    if image_size is None:
        return profile(_config(model))
    if not isinstance(image_size, int):
        raise UserError(f"force-image-size = {image_size!r} is not a whole number; sweeps take square sizes")
    return profile(_config(model), image_size)


def _budget(settings: dict[str, Any], size: Profile) -> dict[str, Any]:
    """The train flags that set the samples seen; none where [base] sets them with OpenCLIP's flags."""
    if "samples" in settings and "gmacs_total" in settings:
        raise UserError("samples and gmacs_total both set the budget; keep one")
    if "gmacs_total" in settings:
        return {"samples": max(1, round(float(settings["gmacs_total"]) / size.gmacs))}
    if "samples" in settings:
        samples = settings["samples"]
        if isinstance(samples, bool) or not isinstance(samples, int | float) or samples != int(samples) or samples < 1:
            raise UserError(f"samples = {samples!r} is not a whole number above 0")
        return {"samples": int(samples)}
    return {}


def _argv(flags: dict[str, Any]) -> list[str]:
    argv: list[str] = []
    for key, value in sorted(flags.items()):
        if value is False:
            continue
        argv.append(f"--{key}")
        if isinstance(value, dict):
            argv += [f"{k}={v}" for k, v in value.items()]
        elif isinstance(value, list):
            argv += [str(v) for v in value]
        elif value is not True:
            argv.append(str(value))
    return argv
