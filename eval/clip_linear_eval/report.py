"""One self-contained page, and the same in Markdown, for a sweep or a file of rows: conclusions, then evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clip_linear.files import write_text
from clip_linear.provenance import commit, date, versions_text
from clip_linear_eval import plots
from clip_linear_eval.fit_read import read_table
from clip_linear_eval.report_data import Fitted, Run, fit_everything, from_fit, read_fit, read_runs, rows_path
from clip_linear_eval.report_figures import Figure, all_figures, published_laws
from clip_linear_eval.report_tables import Sheet, comparison_sheet, laws_sheet, rows_sheet, runs_sheet
from clip_linear_eval.report_words import conclusions

PICTURE = "scaling.svg"  # the page's first figure as a file of its own


@dataclass(frozen=True)
class Report:
    """Everything the templates show."""

    title: str
    subject: str
    synthetic: bool
    conclusions: list[tuple[str, list[str]]]
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
    rows = rows_path(source)
    table, folder = read_table(rows), rows.parent
    if fit_path is None and source.is_dir() and (folder / "fit.json").is_file():
        fit_path = folder / "fit.json"
    given = read_fit(fit_path) if fit_path is not None else None
    runs = read_runs(folder, table) if source.is_dir() else []
    report = make_report(table, given, runs, name=source.resolve().stem)
    out = out or folder
    if report.figures:
        write_picture(out / PICTURE, report.figures[0])
    write_text(out / "report.md", render("report.md.j2", report))
    write_text(out / "report.html", render("report.html.j2", report))
    return out / "report.html"


def write_picture(path: Path, figure: Figure) -> None:
    """A figure as an SVG file, for a README."""
    write_text(path, plots.standalone(figure.svg))


def make_report(table: Any, given: dict[str, Any] | None, runs: Sequence[Run], *, name: str) -> Report:
    """The report of rows, the fit that was made of them (else fits are made here), and the runs behind them."""
    fits = list(fit_everything(table, given))
    if given is not None:
        main = from_fit(table, given)
        fits = [main, *(f for f in fits if f.title != main.title)]
    names = list(dict.fromkeys([*(n for f in fits for n in f.points), *(r.variant for r in runs)]))
    style = plots.styles(names)
    sheets = (laws_sheet(fits), comparison_sheet(fits), runs_sheet(runs), rows_sheet(table))
    return Report(
        title=f"{name}: how error falls with size",
        subject=fits[0].title if fits else "",
        synthetic="provenance" in table.columns and bool((table["provenance"].astype(str) == "synthetic").any()),
        conclusions=_conclusions(fits),
        figures=all_figures(fits, runs, table, style),
        sheets=[s for s in sheets if s.rows],
        warnings=_warnings(fits),
        dropped=[f"row {d['row']}: {d['reason']}" for d in (fits[0].json or {} if fits else {}).get("dropped", [])],
        conventions=_conventions(fits[0]) if fits else [],
        made=f"{date()}, {versions_text()}{', commit ' + commit() if commit() else ''}",
    )


def _conclusions(fits: Sequence[Fitted]) -> list[tuple[str, list[str]]]:
    if not fits:
        return [("Nothing can be concluded", ["The rows hold nothing that a law could be fitted to."])]
    if fits[0].json is None:
        return [("Nothing can be concluded about scaling", [f"{fits[0].title}: {fits[0].refused}."])]
    return conclusions(fits[0].json)


def _warnings(fits: Sequence[Fitted]) -> list[str]:
    """Every warning once, with whom it concerns."""
    about: dict[str, list[str]] = {}
    for fitted in fits:
        if fitted.refused:
            about.setdefault(f"not fitted: {fitted.refused}", []).append(fitted.title)
        for w in (fitted.json or {"warnings": []})["warnings"]:
            whom = f"{fitted.title}, {w['group']}" if "group" in w else fitted.title
            about.setdefault(f"{w['message']} [{w['code']}]", []).append(whom)
    return [f"{text} ({_few(whom)})" for text, whom in about.items()]


def _few(whom: Sequence[str], most: int = 4) -> str:
    return "; ".join(whom[:most]) + (f"; and {len(whom) - most} more" if len(whom) > most else "")


def _conventions(fitted: Fitted) -> list[tuple[str, str]]:
    if fitted.json is None:
        return []
    fit = fitted.json
    said = [(k, str(v)) for k, v in fit["conventions"].items()]
    said += [("form", fit["form"]), ("objective", fit["objective"]), ("frontier", fit["frontier"])]
    said += [
        ("intervals", "95 %: Student t for power laws, F-calibrated profiles otherwise; bands by the delta method"),
        ("multiplier", "how many times the reference's size a variant needs for the same error, inside the data only"),
    ]
    return said + [(f"published: {law.name}", f"{law.source}; {law.note}") for law in published_laws(fitted)]


def render(template: str, report: Report) -> str:
    """Fill one of the templates."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=template.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(report=report, inline=plots.inline, picture=PICTURE)
