"""The figures of a report, the main fit's first, with their captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clip_linear_eval import plots_evidence, plots_laws, plots_runs
from clip_linear_eval.fit import Options, held_out
from clip_linear_eval.fit_input import Columns
from clip_linear_eval.fit_screen import FitRefused
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
        found += _frontiers(fits[0], table, style)
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
    if not fitted.points or fitted.columns.x2 is not None:
        return None
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
        columns = Columns(**{**fitted.columns.__dict__, "x": cost, "x2": None, "budget": None, "sigma": None})
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


def _of_runs(runs: Sequence[Run], style: Mapping[str, Style]) -> list[Figure]:
    loss, speed = plots_runs.loss_figure(runs, style), plots_runs.throughput_figure(runs, style)
    told = "Training loss of every run, averaged over a twentieth of its length; wider lines are larger models."
    found = [] if loss is None else [Figure("loss", loss, told)]
    if speed is not None:
        told = "Median samples per second while training, on the device that the table of runs names."
        found.append(Figure("speed", speed, told))
    return found
