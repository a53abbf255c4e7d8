"""The figures of a report, the main fit's first, with their captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clip_linear_eval import plots_evidence, plots_laws, plots_runs
from clip_linear_eval.fit import Options, held_out
from clip_linear_eval.fit_screen import FitRefused
from clip_linear_eval.fit_table import fit_table
from clip_linear_eval.laws import get_form
from clip_linear_eval.laws_published import Published, matching
from clip_linear_eval.plots import Style
from clip_linear_eval.report_data import Fitted, Run, points_of

_COSTS = ("gmacs_total", "device_hours")


@dataclass(frozen=True)
class Figure:
    """A figure as plain SVG, with what it shows; ``aside`` ones stand in a fold of their own."""

    name: str
    svg: str
    caption: str
    aside: bool = False


def all_figures(fits: Sequence[Fitted], runs: Sequence[Run], table: Any, style: Mapping[str, Style]) -> list[Figure]:
    """Every figure that these data allow."""
    found: list[Figure] = []
    if fits:
        found += [f for f in (_law(fits[0], style, "law"), *_evidence(fits[0], style), _forest(fits, style)) if f]
        found += _frontiers(fits[0], table, style) + _grid(fits[0], table, style)
    found += _of_runs(runs, style)
    return found + [f for i, fit in enumerate(fits[1:], 1) if (f := _law(fit, style, f"law{i}", aside=True))]


def published_laws(fitted: Fitted) -> list[Published]:
    """Published laws of the same metric, data set, unit and x."""
    if fitted.json is None:
        return []
    chosen = dict(text.split("=", 1) for text in fitted.columns.where if "=" in text)
    unit = fitted.json["conventions"]["unit"].split(",")[0].replace("percent", "fraction")
    return matching(fitted.columns.x, chosen.get("metric", fitted.columns.y), chosen.get("dataset", ""), unit)


def _law(fitted: Fitted, style: Mapping[str, Style], name: str, aside: bool = False) -> Figure | None:
    if not fitted.points:
        return None
    if fitted.columns.x2 is not None:  # two factors: no single curve to draw
        svg = plots_laws.residual_figure(fitted.points, fitted.laws, style, x=fitted.columns.x)
        return Figure(name, svg, f"{fitted.title}: deviation of the points from {fitted.columns.y} of the joint law.")
    if fitted.columns.budget is not None:
        return _isoflop(fitted, style, name)
    svg = plots_laws.law_figure(
        fitted.points,
        fitted.laws,
        style,
        x=fitted.columns.x,
        y=fitted.y_name,
        fraction=fitted.is_fraction,
        title=fitted.title,
        synthetic=fitted.synthetic,
        published=published_laws(fitted),
    )
    kind = "synthetic points" if fitted.synthetic else "measured runs"
    lines = "lines the fitted laws with 95 % bands, dotted beyond the data" if fitted.laws else "no law could be fitted"
    return Figure(name, svg, f"{fitted.title}: {kind}; {lines}.", aside)


def _isoflop(fitted: Fitted, style: Mapping[str, Style], name: str) -> Figure | None:
    for group, points in fitted.points.items():
        told = (fitted.json or {"groups": {}})["groups"].get(group)
        if told is not None:
            svg = plots_evidence.isoflop_figure(
                points,
                told["isoflop"],
                style[group],
                name=group,
                x=fitted.columns.x,
                y=fitted.y_name,
                fraction=fitted.is_fraction,
            )
            return Figure(name, svg, f"{group}: parabolas at each budget; diamonds are the vertices that count.")
    return None


def _evidence(fitted: Fitted, style: Mapping[str, Style]) -> list[Figure]:
    """What speaks for and against the main fit."""
    if fitted.json is None or not fitted.laws or fitted.columns.x2 is not None:
        return []
    x, fraction = fitted.columns.x, fitted.is_fraction
    size = plots_laws.multiplier_figure(fitted.json["comparison"], style, x=x)
    slopes = plots_evidence.slope_figure(fitted.points, fitted.laws, style, x=x)
    held = plots_evidence.hold_out_figure(_held_out(fitted), style, fraction=fraction)
    residuals = plots_laws.residual_figure(fitted.points, fitted.laws, style, x=x)
    drawn = (
        ("multiplier", size, "Size for the error of the reference; bands 95 %, inside the data only."),
        ("holdout", held, "The largest size as the smaller ones predict it, and as it was measured."),
        ("residuals", residuals, "Deviation of the points from their laws; a bend means that the form is wrong."),
        ("slopes", slopes, "Exponents between neighbouring sizes, and of the laws (lines)."),
    )
    return [Figure(name, svg, caption) for name, svg, caption in drawn if svg is not None]


def _held_out(fitted: Fitted) -> dict[str, dict[str, Any]]:
    """Each law's hold-out: the fit's own, else of its largest size, where enough sizes are left."""
    found = {}
    for name, law in fitted.laws.items():
        try:
            options = Options(form=law.form, objective=law.objective, hold_out=1)
            found[name] = law.hold_out or held_out(fitted.points[name], get_form(law.form), options)
        except FitRefused:
            continue
    return found


def _forest(fits: Sequence[Fitted], style: Mapping[str, Style]) -> Figure | None:
    alike = [f for f in fits if f.laws and f.metric == fits[0].metric]
    entries = [
        (f"{name} · {f.dataset or f.title}", name, law.params["alpha"], (law.ci95 or {}).get("alpha"))
        for f in alike[:12]
        for name, law in f.laws.items()
    ]
    if len(entries) < 2:
        return None
    return Figure("forest", plots_laws.forest_figure(entries, style), "Exponents with 95 % intervals.")


def _frontiers(fitted: Fitted, table: Any, style: Mapping[str, Style]) -> list[Figure]:
    found = []
    for cost in _COSTS:
        columns = replace(fitted.columns, x=cost, x2=None, budget=None, sigma=None)
        if cost not in table.columns or table[cost].notna().sum() < 2:
            continue
        try:
            points = points_of(table, columns)
        except FitRefused:
            continue
        svg = plots_evidence.frontier_figure(points, style, x=cost, y=fitted.y_name, fraction=fitted.is_fraction)
        if svg is not None:
            found.append(Figure(f"frontier-{cost}", svg, "Every run; the steps are the lowest error reached by then."))
    return found


def _grid(fitted: Fitted, table: Any, style: Mapping[str, Style]) -> list[Figure]:
    """IsoFLOP curves where sizes and samples form a grid with shared budgets."""
    if fitted.columns.budget is not None or not {"samples_seen", "gmacs_total", "n_params_vision"} <= set(
        table.columns
    ):
        return []
    if table["samples_seen"].nunique() < 2:
        return []
    columns = replace(fitted.columns, x="n_params_vision", x2=None, budget="gmacs_total", sigma=None)
    found: list[Figure | None] = []
    try:
        fits = fit_table(table, columns, Options(form="isoflop"))
        points = points_of(table, columns)
    except FitRefused:  # the budgets have no minimum inside: no grid
        return []
    again = replace(fitted, columns=columns, json=fits.json, points=points)
    for group in fits.json["groups"]:
        one = replace(again, points={group: points[group]})
        found.append(_isoflop(one, style, f"isoflop-{len(found)}"))
    return [f for f in found if f is not None]


def _of_runs(runs: Sequence[Run], style: Mapping[str, Style]) -> list[Figure]:
    loss, speed = plots_runs.loss_figure(runs, style), plots_runs.throughput_figure(runs, style)
    told = "Training loss of every run, averaged over a twentieth of its length; wider lines are larger models."
    found = [] if loss is None else [Figure("loss", loss, told)]
    if speed is not None:
        told = "Median samples per second while training, on the device that the table of runs names."
        found.append(Figure("speed", speed, told))
    return found
