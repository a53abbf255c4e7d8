"""One self-contained page, and the same in Markdown, for a sweep or a file of rows: conclusions, then evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clip_linear.files import write_text
from clip_linear.provenance import commit, date, versions_text
from clip_linear_eval import plots, plots_laws, plots_runs
from clip_linear_eval.plots import Style
from clip_linear_eval.report_data import Fitted, Run, fit_everything, from_fit, read_fit, read_rows_table, read_runs
from clip_linear_eval.report_tables import Sheet, comparison_sheet, laws_sheet, rows_sheet, runs_sheet
from clip_linear_eval.report_words import conclusions

PICTURE = "scaling.svg"  # the page's first figure as a file of its own


@dataclass(frozen=True)
class Figure:
    """A figure as plain SVG, with what it shows."""

    name: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Report:
    """Everything the templates show."""

    title: str
    synthetic: bool
    conclusions: list[str]
    figures: list[Figure]
    sheets: list[Sheet]
    warnings: list[str]
    dropped: list[str]
    conventions: list[tuple[str, str]]
    made: str


def write_report(source: Path, fit_path: Path | None = None, out: Path | None = None) -> Path:
    """Write report.html, report.md and scaling.svg into ``out`` (default: beside the rows); returns the page's path.

    ``source`` is a sweep's folder (rows.csv, fit.json and runs/ where present) or a file of rows. Raises UserError.
    """
    rows_path, table = read_rows_table(source)
    folder = rows_path.parent
    if fit_path is None and source.is_dir() and (folder / "fit.json").is_file():
        fit_path = folder / "fit.json"
    given = read_fit(fit_path) if fit_path is not None else None
    report = make_report(table, given, read_runs(folder, table) if source.is_dir() else [], name=source.resolve().stem)
    out = out or folder
    if report.figures:
        write_text(out / PICTURE, plots.standalone(report.figures[0].svg))
    write_text(out / "report.md", render("report.md.j2", report))
    write_text(out / "report.html", render("report.html.j2", report))
    return out / "report.html"


def make_report(table: Any, given: dict[str, Any] | None, runs: Sequence[Run], *, name: str) -> Report:
    """The report of rows, the fit that was made of them (else fits are made here), and the runs behind them."""
    fits = list(fit_everything(table, given))
    if given is not None:
        main = from_fit(table, given)
        fits = [main, *(f for f in fits if f.title != main.title)]
    names = list(dict.fromkeys([*(n for f in fits for n in f.points), *(r.variant for r in runs)]))
    style = plots.styles(names)
    synthetic = "provenance" in table.columns and bool((table["provenance"].astype(str) == "synthetic").any())
    main_json = fits[0].json if fits else None
    return Report(
        title=f"{name}: how error falls with size",
        synthetic=synthetic,
        conclusions=_conclusions(fits),
        figures=[*_law_figures(fits, style, synthetic), *_run_figures(runs, style)],
        sheets=[s for s in (laws_sheet(fits), comparison_sheet(fits), runs_sheet(runs), rows_sheet(table)) if s.rows],
        warnings=_warnings(fits),
        dropped=[f"row {d['row']}: {d['reason']}" for d in (main_json or {}).get("dropped", [])],
        conventions=_conventions(main_json),
        made=f"{date()}, {versions_text()}{', commit ' + commit() if commit() else ''}",
    )


def _conclusions(fits: Sequence[Fitted]) -> list[str]:
    if not fits:
        return ["Nothing can be concluded: the rows hold nothing that a law could be fitted to."]
    first = fits[0]
    if first.json is None:
        return [f"{first.title}: nothing can be concluded about scaling: {first.refused}."]
    return [f"About {first.title}:", *conclusions(first.json)]


def _law_figures(fits: Sequence[Fitted], style: Mapping[str, Style], synthetic: bool) -> list[Figure]:
    found: list[Figure] = []
    for i, fitted in enumerate(fits):
        if not fitted.points or (fitted.json is not None and fitted.json["x2"]):
            continue
        x = fitted.json["x"] if fitted.json else "size"
        fraction = fitted.json is not None and fitted.json["conventions"]["unit"].startswith(("fraction", "percent"))
        y = "error" if fraction else "value"
        svg = plots_laws.law_figure(
            fitted.points, fitted.laws, style, x=x, y=y, fraction=fraction, title=fitted.title, synthetic=synthetic
        )
        note = "Points are measured runs" if not synthetic else "Points are synthetic"
        found.append(
            Figure(
                f"law{i}",
                svg,
                f"{fitted.title}: {note}, lines the fitted laws with 95 % bands, dotted beyond the data.",
            )
        )
        if i == 0 and fitted.json is not None:
            found += _evidence(fitted, style, x)
    entries = [
        (f"{name} · {f.title}", name, law["params"]["alpha"], (law["ci95"] or {}).get("alpha"))
        for f in fits
        for name, law in (f.json or {"groups": {}})["groups"].items()
    ]
    if len(entries) > 1:
        found.append(
            Figure(
                "forest",
                plots_laws.forest_figure(entries, style),
                "Exponents with 95 % intervals; cut where they leave the frame.",
            )
        )
    return found


def _evidence(fitted: Fitted, style: Mapping[str, Style], x: str) -> list[Figure]:
    assert fitted.json is not None
    found = []
    size = plots_laws.multiplier_figure(fitted.json["comparison"], style, x=x)
    if size is not None:
        found.append(
            Figure(
                "multiplier", size, "Size that each variant needs for the error of the reference, inside the data only."
            )
        )
    if fitted.laws:
        svg = plots_laws.residual_figure(fitted.points, fitted.laws, style, x=x)
        found.append(
            Figure("residuals", svg, "Deviation of the points from their laws; a bend means that the form is wrong.")
        )
    return found


def _run_figures(runs: Sequence[Run], style: Mapping[str, Style]) -> list[Figure]:
    loss, speed = plots_runs.loss_figure(runs, style), plots_runs.throughput_figure(runs, style)
    found = (
        []
        if loss is None
        else [Figure("loss", loss, "Training loss of every run, averaged over a twentieth of its length.")]
    )
    if speed is not None:
        found.append(
            Figure("speed", speed, "Median samples per second while training, on the device that the table names.")
        )
    return found


def _warnings(fits: Sequence[Fitted]) -> list[str]:
    said = [f"{f.title}: not fitted: {f.refused}" for f in fits if f.refused]
    for fitted in fits:
        for w in (fitted.json or {"warnings": []})["warnings"]:
            said.append(f"{fitted.title}{', ' + w['group'] if 'group' in w else ''}: {w['message']} [{w['code']}]")
    return list(dict.fromkeys(said))


def _conventions(fit: dict[str, Any] | None) -> list[tuple[str, str]]:
    if fit is None:
        return []
    said = [(k, str(v)) for k, v in fit["conventions"].items()]
    said += [("form", fit["form"]), ("objective", fit["objective"])]
    return [
        *said,
        ("intervals", "95 %: Student t for power laws, F-calibrated profiles otherwise; bands by the delta method"),
        ("multiplier", "how many times the reference's size a variant needs for the same error, inside the data only"),
    ]


def render(template: str, report: Report) -> str:
    """Fill one of the templates."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = Path(__file__).parent / "templates"
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=template.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(report=report, inline=plots.inline, picture=PICTURE)
