"""Fit every group of a table, compare the groups with a reference, and gather it all as fit.json holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from clip_linear.errors import UserError, unknown
from clip_linear_eval.compare import Comparison, compare_laws, holm
from clip_linear_eval.compare_paired import paired
from clip_linear_eval.fit import Law, Options, fit_screened, screen_for, select_points
from clip_linear_eval.fit_input import Columns, Group, Table, select
from clip_linear_eval.fit_screen import Dropped, FitRefused, Screened
from clip_linear_eval.fit_select import choose_form
from clip_linear_eval.isoflop import Isoflop, fit_isoflop

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "clip_linear.fit/1"


@dataclass(frozen=True, kw_only=True)
class Fits:
    """The laws and comparisons of a table, and the JSON that says the same."""

    laws: dict[str, Law]
    comparisons: list[Comparison]
    json: dict[str, Any] = field(repr=False)


def fit_table(rows: pd.DataFrame, columns: Columns, options: Options, ref: str | None = None) -> Fits:
    """Fit ``columns.y`` by ``columns.x`` for each group of the rows. Raises FitRefused if no group can be fitted.

    A group that is refused beside others that are not becomes a warning with its code. ``ref`` is the group that the
    others are compared with: by default softmax if it is there, else the first.
    """
    table = select(rows, columns)
    seen, refusals = _screened(table, columns, options)
    asked, selection = options.form, None
    if options.form == "auto":
        ready = [select_points(s.points, options, columns.x) for s in seen.values()]
        form, selection = choose_form(ready, options.objective, table.unit in ("fraction", "percent"))
        options = replace(options, form=form)
    found: dict[str, Law | Isoflop] = {}
    for name, screened in seen.items():
        try:
            found[name] = _fit(screened, options, columns.x, table.runs)
        except FitRefused as refusal:
            refusals[name] = refusal
    if not found:
        raise next(iter(refusals.values()))
    laws = {name: law for name, law in found.items() if isinstance(law, Law)}
    comparisons = compare_groups(laws, ref, list(refusals), table.pairs) if columns.group and laws else []
    warnings = [{"code": c.code, "message": c.message} for c in table.cautions]
    warnings += [_about(name, columns.group, c.code, c.message) for name, law in found.items() for c in law.warnings]
    warnings += [_about(name, columns.group, r.code, str(r)) for name, r in refusals.items()]
    dropped: list[Dropped] = [*table.dropped, *(d for law in found.values() for d in law.dropped)]
    return Fits(
        laws=laws,
        comparisons=comparisons,
        json={
            "schema": SCHEMA,
            "status": "ok",
            "form": options.form,
            "form_asked": asked,
            "objective": options.objective,
            "frontier": options.frontier,
            "x": columns.x,
            "y": columns.y,
            "x2": columns.x2,
            "group": columns.group,
            "ref": comparisons[0].ref if comparisons else None,
            "columns": asdict(columns),
            "conventions": {**table.conventions, "unit": _unit_said(table.unit)},
            "synthetic": table.synthetic,
            "selection": selection,
            "groups": {name: law.to_json() for name, law in found.items()},
            "comparison": [c.to_json() for c in comparisons],
            "warnings": warnings,
            "dropped": [asdict(d) for d in sorted(dropped, key=lambda d: d.row)],
        },
    )


def _screened(table: Table, columns: Columns, options: Options) -> tuple[dict[str, Screened], dict[str, FitRefused]]:
    seen: dict[str, Screened] = {}
    refusals: dict[str, FitRefused] = {}
    for group in table.groups:
        try:
            seen[group.name] = _screen(group, table, columns, options)
        except FitRefused as refusal:
            refusals[group.name] = refusal
    if not seen:
        raise next(iter(refusals.values()))
    return seen, refusals


def _screen(group: Group, table: Table, columns: Columns, options: Options) -> Screened:
    return screen_for(
        options,
        group.x,
        group.y,
        x2=group.x2,
        sigma=group.sigma,
        rows=group.rows,
        unit=table.unit,
        names=(columns.x, columns.y, columns.budget or columns.x2 or "x2"),
        n_rows=group.n_rows,
    )


def _fit(seen: Screened, options: Options, x_name: str, runs: dict[int, str] | None) -> Law | Isoflop:
    return fit_isoflop(seen) if options.form == "isoflop" else fit_screened(seen, options, x_name, runs)


def _about(name: str, grouped: str | None, code: str, message: str) -> dict[str, str]:
    return {"code": code, "message": message} | ({"group": name} if grouped else {})


def _unit_said(unit: str | None) -> str:
    return {None: "not declared", "percent": "percent, converted to fractions"}.get(unit, str(unit))


def compare_groups(
    laws: Mapping[str, Law], ref: str | None, refused: Sequence[str] = (), pairs: Mapping[int, str] | None = None
) -> list[Comparison]:
    """Every other group against ``ref``: p values also Holm-adjusted, and run by run where ``pairs`` match."""
    if ref is not None and ref not in laws:
        if ref in refused:
            raise UserError(f"the reference {ref!r} could not be fitted; choose another --ref")
        raise unknown("reference group", ref, laws, "choose one of them with --ref")
    ref = ref or ("softmax" if "softmax" in laws else next(iter(laws)))
    base = laws[ref]
    if base.objective not in ("gaussian", "linear"):
        return []
    found = [compare_laws(base, law, names=(ref, name)) for name, law in laws.items() if name != ref]
    adjusted = holm([c.equal_exponent["p"] for c in found])
    matched = [paired(base, laws[c.group], pairs or {}) for c in found]
    return [replace(c, p_holm=p, paired=m) for c, p, m in zip(found, adjusted, matched)]
