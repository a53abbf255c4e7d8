"""Fit every group of a table, compare the groups with a reference, and gather it all as fit.json holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from clip_linear.errors import UserError, unknown
from clip_linear_eval.compare import Comparison, compare_laws, holm
from clip_linear_eval.fit import Law, fit_law
from clip_linear_eval.fit_input import Columns, Group, Table, select
from clip_linear_eval.fit_screen import Dropped, FitRefused, screen
from clip_linear_eval.isoflop import Isoflop, fit_isoflop

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "clip_linear.fit/1"


@dataclass(frozen=True, kw_only=True)
class Fits:
    """The laws and comparisons of a table, and the JSON that says the same."""

    columns: Columns
    table: Table
    laws: dict[str, Law]
    comparisons: list[Comparison]
    json: dict[str, Any] = field(repr=False)


def fit_table(
    rows: pd.DataFrame,
    columns: Columns,
    *,
    form: str = "power",
    objective: str = "gaussian",
    ref: str | None = None,
    predict: Sequence[float] = (),
) -> Fits:
    """Fit ``columns.y`` by ``columns.x`` for each group of the rows. Raises FitRefused if no group can be fitted.

    A group that is refused beside others that are not becomes a warning with its code. ``ref`` is the group that the
    others are compared with: by default softmax if it is there, else the first.
    """
    table = select(rows, columns)
    laws: dict[str, Law] = {}
    entries: dict[str, Any] = {}
    warnings, refusals = [{"code": c.code, "message": c.message} for c in table.cautions], []
    dropped: list[Dropped] = list(table.dropped)
    for group in table.groups:
        try:
            found = (
                _isoflop(group, table, columns)
                if form == "isoflop"
                else _law(group, table, columns, form, objective, predict)
            )
        except FitRefused as refusal:
            refusals.append((group.name, refusal))
            continue
        entries[group.name] = found.to_json()
        if isinstance(found, Law):
            laws[group.name] = found
        dropped += found.dropped
        warnings += [_about(group.name, columns.group, c.code, c.message) for c in found.warnings]
    if not entries:
        raise refusals[0][1]
    warnings += [_about(name, columns.group, r.code, str(r)) for name, r in refusals]
    comparisons = compare_groups(laws, ref, [name for name, _ in refusals]) if columns.group and laws else []
    return Fits(
        columns=columns,
        table=table,
        laws=laws,
        comparisons=comparisons,
        json={
            "schema": SCHEMA,
            "status": "ok",
            "form": form,
            "objective": objective,
            "x": columns.x,
            "y": columns.y,
            "x2": columns.x2,
            "group": columns.group,
            "ref": comparisons[0].ref if comparisons else None,
            "columns": asdict(columns),
            "conventions": {**table.conventions, "unit": _unit_said(table.unit)},
            "synthetic": table.synthetic,
            "groups": entries,
            "comparison": [c.to_json() for c in comparisons],
            "warnings": warnings,
            "dropped": [asdict(d) for d in sorted(dropped, key=lambda d: d.row)],
        },
    )


def _law(group: Group, table: Table, columns: Columns, form: str, objective: str, predict: Sequence[float]) -> Law:
    law = fit_law(
        group.x,
        group.y,
        form,
        x2=group.x2,
        objective=objective,
        sigma=group.sigma,
        unit=table.unit,
        predict=predict,
        rows=group.rows,
        names=(columns.x, columns.y),
    )
    return replace(law, n_rows=group.n_rows)


def _isoflop(group: Group, table: Table, columns: Columns) -> Isoflop:
    names = (columns.x, columns.y)
    return fit_isoflop(
        screen(group.x, group.y, x2=group.x2, rows=group.rows, unit=table.unit, names=names, n_rows=group.n_rows)
    )


def _about(name: str, grouped: str | None, code: str, message: str) -> dict[str, str]:
    return {"code": code, "message": message} | ({"group": name} if grouped else {})


def _unit_said(unit: str | None) -> str:
    return {None: "not declared", "percent": "percent, converted to fractions"}.get(unit, str(unit))


def compare_groups(laws: dict[str, Law], ref: str | None, refused: Sequence[str] = ()) -> list[Comparison]:
    """Every other group against ``ref``, p values also Holm-adjusted for their number."""
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
    return [replace(c, p_holm=p) for c, p in zip(found, adjusted)]
