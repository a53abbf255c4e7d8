"""The columns x, y, x2, sigma and group that a fit takes from rows, per group."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from clip_linear.errors import UserError
from clip_linear_eval.fit_screen import UNITS, Caution, Dropped, FitRefused
from clip_linear_eval.fit_weights import SEEDS, replicate_sigma
from clip_linear_eval.laws import Array

if TYPE_CHECKING:
    import pandas as pd

# Metrics of our rows that are accuracies: their error is 1 − value.
_ACCURACY = re.compile(r"^((linear_probe_|knn_)?top\d+(_hierarchical)?|acc\d*|accuracy|.*recall.*)$")
_FINISHED = {"", "ok", "done", "finished", "complete", "completed"}
# What the columns of our rows mean, so that every fit states its convention.
CONVENTIONS = {
    "n_params_vision": "parameters of the vision tower",
    "n_params_text": "parameters of the text tower",
    "n_params_embedding": "parameters of the embedding tables",
    "n_params_total": "parameters of the whole model",
    "n_params_non_embedding": "parameters of the whole model without embedding tables",
    "samples_seen": "training samples seen",
    "gmacs": "1e9 multiply-accumulates of one image and one text forward",
    "gmacs_total": "forward GMACs per sample x samples seen (no factor 2 for FLOPs, none for the backward pass)",
    "device_hours": "measured device hours of training",
}


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which columns, and which rows of them."""

    x: str
    y: str
    x2: str | None = None
    budget: str | None = None
    sigma: str | None = None
    group: str | None = None
    where: tuple[str, ...] = ()  # COLUMN=VALUE
    unit: str | None = None
    max_x: float | None = None
    drop_top_y: int = 0


@dataclass(frozen=True)
class Group:
    """The numbers of one group (variant): arrays of shape [n], NaN where a cell is no number, and their row numbers."""

    name: str
    x: Array
    y: Array
    x2: Array | None
    sigma: Array | None
    rows: list[int]
    n_rows: int


@dataclass(frozen=True)
class Table:
    """All groups, what was left out before screening, and what the columns mean."""

    groups: list[Group]
    unit: str | None
    conventions: dict[str, str]
    dropped: tuple[Dropped, ...]
    cautions: tuple[Caution, ...]
    synthetic: bool
    runs: dict[int, str] | None  # row number -> run, where rows name one
    pairs: dict[int, str]  # row number -> what it shares with its counterpart in another group (size, samples, seed)


def _group_names(table: pd.DataFrame, columns: Columns) -> list[str]:
    """The group of each row; "all" without a group column, "" where the cell is empty."""
    if columns.group is None:
        return ["all"] * len(table)
    return ["" if g is None or g != g else str(g) for g in table[columns.group]]


def is_accuracy(metric: str) -> bool:
    """Whether 1 − value of a metric of our rows is an error."""
    return _ACCURACY.match(metric) is not None


def select(table: pd.DataFrame, columns: Columns) -> Table:
    """Take the columns of a fit from rows. Raises FitRefused (missing_column, mixed_units, no_positive_rows)."""
    table = table.copy()
    table["_row"] = np.arange(1, len(table) + 1)
    table = _where(table, columns.where)
    conventions, table = _derive(table, columns)
    by_seeds = columns.sigma == SEEDS and SEEDS not in table.columns
    spread = None if by_seeds else columns.sigma
    wanted = [columns.x, columns.y, columns.x2, columns.budget, spread, columns.group]
    missing = [c for c in wanted if c is not None and c not in table.columns]
    if missing:
        present = ", ".join(str(c) for c in table.columns if c != "_row")
        raise FitRefused("missing_column", f"no column {', '.join(missing)}; the rows have: {present}", missing)
    unit, cautions = _unit(table, columns)
    total = Counter(_group_names(table, columns))
    table, dropped = _unfinished(table)
    data = {c: _numbers(table, c) for c in wanted[:5] if c is not None}
    names = np.array(_group_names(table, columns), dtype=object)
    groups = []
    for name in dict.fromkeys(names):
        mask = names == name
        rows = table["_row"].to_numpy()[mask].tolist()
        if name == "":
            dropped += [Dropped(r, f"no {columns.group}") for r in rows]
            continue
        second = columns.budget or columns.x2
        keep, left_out = _cut(data[columns.x][mask], data[columns.y][mask], rows, columns)
        dropped += left_out
        part = {c: v[mask][keep] for c, v in data.items()}
        groups.append(
            Group(
                name=name,
                x=part[columns.x],
                y=part[columns.y],
                x2=part[second] if second else None,
                sigma=replicate_sigma(part[columns.x], part[columns.y]) if by_seeds else part.get(spread or ""),
                rows=[r for r, k in zip(rows, keep) if k],
                n_rows=total[name],
            )
        )
    if not groups:
        raise FitRefused("no_positive_rows", "no rows are left to fit")
    synthetic = "provenance" in table.columns and bool((table["provenance"].astype(str) == "synthetic").any())
    return Table(
        groups, unit, conventions, tuple(dropped), tuple(cautions), synthetic, _runs(table), _pairs(table, columns)
    )


def _where(table: pd.DataFrame, where: Sequence[str]) -> pd.DataFrame:
    for text in where:
        column, sign, value = (part.strip() for part in text.partition("="))
        if not sign:
            raise UserError(f"--where {text!r} is not COLUMN=VALUE")
        if column not in table.columns:
            known = ", ".join(str(c) for c in table.columns if c != "_row")
            raise FitRefused("missing_column", f"no column {column}; the rows have: {known}", [column])
        kept = table[[_same(cell, value) for cell in table[column]]]
        if kept.empty:
            seen = ", ".join(map(str, list(dict.fromkeys(table[column]))[:12]))
            raise FitRefused("no_positive_rows", f"no row has {column} = {value!r}; there are: {seen}")
        table = kept
    return table


def _same(cell: Any, value: str) -> bool:
    if str(cell) == value:
        return True
    try:
        return float(cell) == float(value)
    except (TypeError, ValueError):
        return False


def _numbers(table: pd.DataFrame, column: str) -> Array:
    import pandas as pd

    return pd.to_numeric(table[column], errors="coerce").to_numpy(dtype=float)


def _derive(table: pd.DataFrame, columns: Columns) -> tuple[dict[str, str], pd.DataFrame]:
    """Columns that rows of our schema imply: the error 1 − value of an accuracy, and non-embedding parameters."""
    said = {c: CONVENTIONS.get(c, f"column {c}, as given") for c in (columns.x, columns.x2, columns.budget) if c}
    said["y"] = f"column {columns.y}, as given"
    if columns.x == "n_params_non_embedding" and columns.x not in table.columns:
        parts = ("n_params_total", "n_params_embedding")
        if all(p in table.columns for p in parts):
            table[columns.x] = _numbers(table, parts[0]) - _numbers(table, parts[1])
    if {"metric", "value"} <= set(table.columns) and columns.y in ("value", "error"):
        for column in ("metric", "dataset"):
            kinds = sorted(set(table[column].dropna().astype(str))) if column in table.columns else []
            if len(kinds) > 1:
                choice = next((k for k in ("top1", "top5") if k in kinds), kinds[0])
                raise FitRefused(
                    "mixed_units",
                    f"the rows mix {column}s {', '.join(kinds)}; choose one, e.g. --where {column}={choice} "
                    "(--where may be given several times)",
                )
    if columns.y == "error" and "error" not in table.columns and {"metric", "value", "unit"} <= set(table.columns):
        metric = str(table["metric"].iloc[0])
        whole = {"fraction": 1.0, "percent": 100.0}.get(str(table["unit"].iloc[0]))
        if not is_accuracy(metric) or whole is None:
            raise FitRefused(
                "missing_column", f"no column error, and metric {metric!r} is no accuracy to derive it from", ["error"]
            )
        table["error"] = whole - _numbers(table, "value")
        said["y"] = f"error = {whole:g} - value of metric {metric}"
    return said, table


def _unit(table: pd.DataFrame, columns: Columns) -> tuple[str | None, list[Caution]]:
    """The declared unit of y; a column ``unit`` declares it too, and must not hold two."""
    if "unit" not in table.columns or columns.y == "unit":
        return columns.unit, []
    units = sorted(set(table["unit"].dropna().astype(str)))
    if len(units) > 1:
        raise FitRefused("mixed_units", f"the rows mix the units {', '.join(units)}; choose: --where unit={units[0]}")
    found = {"nats": "loss"}.get(units[0], units[0]) if units else None
    found = found if found in UNITS else None
    if columns.unit and found and columns.unit != found:
        return columns.unit, [Caution("unit_mismatch", f"--unit {columns.unit} but the rows' unit is {found}")]
    return columns.unit or found, []


def _runs(table: pd.DataFrame) -> dict[int, str] | None:
    if "run_id" not in table.columns or table["run_id"].isna().any():
        return None
    return dict(zip(table["_row"].tolist(), table["run_id"].astype(str)))


def _pairs(table: pd.DataFrame, columns: Columns) -> dict[int, str]:
    """Rows of different groups with the same key are counterparts: same base model (else x), samples seen and seed."""
    if "seed" not in table.columns or columns.group is None:
        return {}
    named = [c for c in ("arch", "model") if c in table.columns and table[c].notna().all() and c != columns.group]
    sizes = [str(v).split("+")[0] for v in table[named[0] if named else columns.x]]
    seen = table["samples_seen"] if "samples_seen" in table.columns else [""] * len(table)
    return dict(zip(table["_row"].tolist(), (f"{a}|{b}|{c}" for a, b, c in zip(sizes, table["seed"], seen))))


def _unfinished(table: pd.DataFrame) -> tuple[pd.DataFrame, list[Dropped]]:
    if "status" not in table.columns:
        return table, []
    states = ["" if s is None or s != s else str(s) for s in table["status"]]
    bad = np.array([s.strip().lower() not in _FINISHED for s in states], dtype=bool)
    dropped = [Dropped(int(r), f"status {s}") for r, s, b in zip(table["_row"], states, bad) if b]
    return table[~bad], dropped


def _cut(x: Array, y: Array, rows: list[int], columns: Columns) -> tuple[Array, list[Dropped]]:
    keep, dropped = np.ones(len(x), dtype=bool), []
    if columns.max_x is not None:
        if columns.max_x != columns.max_x:
            raise UserError("--max-x nan is not a number; give the largest x to keep")
        keep &= ~(x > columns.max_x)
        dropped += [Dropped(r, f"{columns.x} above --max-x") for r, k in zip(rows, keep) if not k]
    if columns.drop_top_y:
        order = [
            i for i in np.argsort(-np.where(np.isfinite(y), y, -np.inf), kind="stable") if keep[i] and np.isfinite(y[i])
        ]
        for i in order[: columns.drop_top_y]:
            keep[i] = False
            dropped.append(Dropped(rows[i], f"among the {columns.drop_top_y} highest {columns.y}"))
    return keep, dropped
