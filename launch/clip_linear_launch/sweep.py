"""A sweep file (TOML, strict) as data. What it expands to is in expand.py."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clip_linear.errors import UserError, unknown
from clip_linear_launch import spec

TABLES = ("sweep", "base", "grid", "runs", "exclude", "per_model", "resources", "limits", "eval", "hardware")
_PROFILE_TABLES = ("resources", "limits", "hardware")
# Keys that are ours, beside the train flags, in [grid], [[runs]] and exclude.
CELL_KEYS = ("model", "image", "text", "samples", "gmacs_total", "seed")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One sweep file. Flags are stored with dashes (``batch-size``); paths are still as the file has them."""

    path: Path
    digest: str  # of the file and its profile: has the sweep changed since it was laid out?
    head: spec.SweepHead
    base: dict[str, Any]
    grid: dict[str, list[Any]]
    runs: list[dict[str, Any]]
    exclude: list[dict[str, Any]]
    per_model: dict[str, dict[str, Any]]
    resources: spec.Resources
    limits: spec.Limits
    eval: spec.Eval
    hardware: spec.Hardware

    @property
    def here(self) -> Path:
        """The folder that relative paths start from."""
        return self.path.parent

    @property
    def folder(self) -> Path:
        """Where the sweep lives: [sweep] folder, else root/name."""
        if self.head.folder is not None:
            return (self.here / self.head.folder).resolve()
        return (self.here / self.head.root / self.head.name).resolve()


def load(path: Path | str, root: Path | str | None = None) -> Sweep:
    """Read a sweep file; ``root`` replaces its [sweep] root. Raises UserError with the key that is wrong."""
    path = Path(path).resolve()
    table, text = _toml(path, "sweep file")
    for key in table:
        if key not in TABLES:
            raise unknown("table in the sweep file", key, TABLES, "see launch/README.md")
    exclude = _exclude(table)
    if "sweep" not in table:
        raise UserError(f'{path.name} has no [sweep] table; it needs at least: [sweep] name = "…"')
    head = spec.build(spec.SweepHead, table["sweep"], "[sweep]")
    if root is not None:
        head = dataclasses.replace(head, root=str(Path(root).resolve()), folder=None)
    if not re.fullmatch(r"[A-Za-z0-9._-]+", head.name) or head.name.startswith("."):
        raise UserError(f"[sweep] name {head.name!r} names a folder; use letters, digits, '.', '_' and '-'")
    if head.backend not in spec.BACKENDS:
        raise unknown("backend", head.backend, spec.BACKENDS, "set [sweep] backend")
    profile, profile_text = _profile(head.profile, path.parent)
    merged = {key: profile.get(key, {}) | table.get(key, {}) for key in _PROFILE_TABLES}
    limits = spec.build(spec.Limits, merged["limits"], "[limits]")
    for key in ("max_parallel", "array_parallelism", "max_timeouts"):
        if getattr(limits, key) < 1:
            raise UserError(f"[limits] {key} = {getattr(limits, key)} must be at least 1")
    sweep = Sweep(
        path=path,
        digest=hashlib.sha256((text + profile_text).encode()).hexdigest()[:16],
        head=head,
        base=_flags(table.get("base", {}), "[base]"),
        grid=_grid(table.get("grid", {})),
        runs=[_flags(run, "[[runs]]") for run in _list(table.get("runs", []), "runs")],
        exclude=[_flags(cell, "exclude") for cell in _list(exclude, "exclude")],
        per_model={name: _flags(t, f'[per_model."{name}"]') for name, t in table.get("per_model", {}).items()},
        resources=check_resources(spec.build(spec.Resources, merged["resources"], "[resources]")),
        limits=limits,
        eval=spec.build(spec.Eval, table.get("eval", {}), "[eval]"),
        hardware=spec.build(spec.Hardware, merged["hardware"], "[hardware]"),
    )
    _check_budget(sweep)
    return sweep


def check_resources(resources: spec.Resources) -> spec.Resources:
    """The same, if it makes sense. Raises UserError."""
    for key in ("nodes", "tasks"):
        if getattr(resources, key) < 1:
            raise UserError(f"[resources] {key} = {getattr(resources, key)} must be at least 1")
    if resources.gpus_per_node < 0:
        raise UserError(f"[resources] gpus_per_node = {resources.gpus_per_node} must not be negative")
    if resources.gpus_per_node and resources.tasks != resources.gpus_per_node:
        raise UserError(
            f"[resources] tasks_per_node = {resources.tasks} but gpus_per_node = {resources.gpus_per_node}; "
            "a run has one task per GPU: leave tasks_per_node out"
        )
    _ = resources.time_s
    return resources


def _toml(path: Path, what: str) -> tuple[dict[str, Any], str]:
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text), text
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise UserError(f"{what} {str(path)!r} does not exist; give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{what} {str(path)!r} is not valid TOML: {error}") from None


def profiles_folder() -> Path:
    """Where the profiles that come with clip_linear lie: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parent
    return next((p for p in (package / "profiles", package.parent / "profiles") if p.is_dir()), package / "profiles")


def _profile(name: str | None, here: Path) -> tuple[dict[str, Any], str]:
    if name is None:
        return {}, ""
    path = here / name if name.endswith(".toml") else profiles_folder() / f"{name}.toml"
    if not name.endswith(".toml") and not path.is_file():
        known = [p.stem for p in profiles_folder().glob("*.toml")]
        raise unknown("profile", name, known, "give one of these or the path of a .toml file")
    table, text = _toml(path, "profile")
    for key in table:
        if key not in _PROFILE_TABLES:
            raise unknown(f"table in profile {path.name}", key, _PROFILE_TABLES, "see launch/README.md")
    return table, text


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or any(not isinstance(item, dict) for item in value):
        raise UserError(f"{where} must be a list of tables")
    return value


def _exclude(table: dict[str, Any]) -> Any:
    # TOML puts a bare `exclude = …` written below [grid] or [sweep] into that table; it is meant there.
    grid, head = table.get("grid", {}), table.get("sweep", {})
    nested = [t.pop("exclude") for t in (grid, head) if isinstance(t, dict) and "exclude" in t]
    return [*table.get("exclude", []), *(cell for cells in nested for cell in cells)]


def _flags(table: Any, where: str) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise UserError(f"{where} must be a table of train flags, not {table!r}")
    # Our own cell keys and resources keep their underscores, train flags are written with dashes or underscores.
    keep = {*CELL_KEYS, *spec.Resources.__dataclass_fields__}
    return {key if key in keep else key.replace("_", "-"): value for key, value in table.items()}


def _grid(table: Any) -> dict[str, list[Any]]:
    grid = _flags(table, "[grid]")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"[grid] {key} = {values!r} must be a list with at least one value")
        if key in spec.Resources.__dataclass_fields__:
            raise UserError(f'[grid] {key}: resources do not change what is learned; set them in [per_model."NAME"]')
    return grid


def _check_budget(sweep: Sweep) -> None:
    budget = sweep.head.budget
    if budget:
        if len(budget) != 1 or next(iter(budget)) not in ("samples", "gmacs_total"):
            raise UserError(f"[sweep] budget = {budget!r} must be {{samples = N}} or {{gmacs_total = X}}")
        if {"samples", "gmacs_total"} & set(sweep.grid):
            raise UserError("[sweep] budget and [grid] samples/gmacs_total both set the budget; keep one")
