"""The tables of a report: laws, comparisons, runs and rows, as cells with a text and a value to sort by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clip_linear_eval.report_data import Fitted, Run
from clip_linear_eval.report_words import interval, law_text, number

_ROW_COLUMNS = (
    "model", "image_variant", "text_variant", "n_params_vision", "n_params_total", "samples_seen", "gmacs",
    "gmacs_total", "seed", "dataset", "metric", "value", "unit", "n", "ci_low", "ci_high", "provenance", "run_id",
)  # fmt: skip
_COUNTS = ("n_params_vision", "n_params_total", "samples_seen", "gmacs_total")


@dataclass(frozen=True)
class Cell:
    text: str
    value: float | str


@dataclass(frozen=True)
class Sheet:
    """A table: its columns and rows of cells."""

    caption: str
    columns: list[str]
    rows: list[list[Cell]]


def cell(value: Any, text: str | None = None) -> Cell:
    """A cell; numbers sort as numbers, missing ones last."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return Cell("–", "")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Cell(str(value), str(value))
    return Cell(text if text is not None else f"{value:.6g}", float(value))


def laws_sheet(fits: Sequence[Fitted]) -> Sheet:
    columns = [
        "what",
        "variant",
        "law",
        "α",
        "95 %",
        "E",
        "95 % of E",
        "σ of ln y",
        "n",
        "dof",
        "AICc",
        "optimum certified",
    ]
    rows = []
    for fitted in fits:
        for name, law in (fitted.json or {"groups": {}})["groups"].items():
            ci, floor = law["ci95"] or {}, law["params"].get("E")
            exponent = "a" if law["form"] == "isoflop" else "alpha"
            rows.append(
                [
                    cell(fitted.title),
                    cell(name),
                    cell(law_text(law)),
                    cell(law["params"][exponent], number(law["params"][exponent])),
                    cell(interval(ci.get(exponent))),
                    cell(floor, number(floor) if floor is not None else None),
                    cell(interval(ci.get("E")) if floor is not None else None),
                    cell(law["sigma"], number(law["sigma"]) if law["sigma"] is not None else None),
                    cell(law["n"]),
                    cell(law["dof"]),
                    cell(law["aicc"], None if law["aicc"] is None else f"{law['aicc']:.1f}"),
                    cell("yes" if law["certificate"]["ok"] else "NO"),
                ]
            )
    return Sheet("Fitted laws", columns, rows)


def comparison_sheet(fits: Sequence[Fitted]) -> Sheet:
    columns = [
        "what",
        "variant",
        "against",
        "Δα",
        "95 %",
        "p (Holm)",
        "detectable",
        "size at least x",
        "95 %",
        "at most x",
        "95 %",
    ]
    rows = []
    for fitted in fits:
        for c in (fitted.json or {"comparison": []})["comparison"]:
            equal, size = c["equal_exponent"], c["size_multiplier"]
            rows.append(
                [
                    cell(fitted.title),
                    cell(c["group"]),
                    cell(c["ref"]),
                    cell(equal["delta_alpha"], number(equal["delta_alpha"])),
                    cell(interval(equal["ci95"])),
                    cell(c["p_holm"], None if c["p_holm"] is None else number(c["p_holm"], 2)),
                    cell(equal["detectable"], None if equal["detectable"] is None else number(equal["detectable"], 2)),
                    cell(size["xmin"], None if size["xmin"] is None else f"{number(size['xmin'])}×"),
                    cell(interval(size["xmin_ci95"])),
                    cell(size["xmax"], None if size["xmax"] is None else f"{number(size['xmax'])}×"),
                    cell(interval(size["xmax_ci95"])),
                ]
            )
    return Sheet(
        "Variants compared (Δα is reference − variant; size for the same error at both ends of the data)", columns, rows
    )


def runs_sheet(runs: Sequence[Run]) -> Sheet:
    columns = [
        "run",
        "variant",
        "size",
        "state",
        "samples",
        "final loss",
        "samples/s",
        "data wait",
        "device",
        "commit",
        "versions",
    ]
    rows = []
    for run in runs:
        last = run.losses[-1] if run.losses else (None, None)
        versions = run.env.get("versions", {})
        told = ", ".join(f"{k} {versions[k]}" for k in ("torch", "open_clip_torch", "clip-linear") if k in versions)
        rows.append(
            [
                cell(run.run_id),
                cell(run.variant),
                cell(run.size, number(run.size) if run.size is not None else None),
                cell(run.state),
                cell(last[0], None if last[0] is None else f"{last[0]:,.0f}"),
                cell(last[1], None if last[1] is None else f"{last[1]:.4f}"),
                cell(run.samples_per_s, None if run.samples_per_s is None else number(run.samples_per_s)),
                cell(run.data_wait_frac, None if run.data_wait_frac is None else f"{100 * run.data_wait_frac:.0f} %"),
                cell(run.device or None),
                cell(run.env.get("commit") or None),
                cell(told or None),
            ]
        )
    return Sheet("What was run on what", columns, rows)


def rows_sheet(table: Any) -> Sheet:
    """Every row of the input: the schema's columns that are not empty; other tables in all their columns."""
    columns = [c for c in _ROW_COLUMNS if c in table.columns and table[c].notna().any()]
    columns = columns if "value" in columns else list(table.columns)
    rows = []
    for row in table[columns].to_dict("records"):
        rows.append([cell(v, f"{v:,.0f}" if c in _COUNTS and _whole(v) else None) for c, v in row.items()])
    return Sheet(f"All {len(rows)} rows", [str(c) for c in columns], rows)


def _whole(v: Any) -> bool:
    return isinstance(v, int | float) and math.isfinite(v) and abs(v) >= 1000
