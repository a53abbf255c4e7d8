"""What may be fitted: refusals, dropped rows and cautions, each with a code that tools can test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from clip_linear.errors import UserError, unknown
from clip_linear_eval.laws import Array, Points

UNITS = ("fraction", "percent", "loss")
REFUSALS = ("insufficient_points", "single_x", "missing_column", "mixed_units", "no_positive_rows")
NAMES = ("x", "y", "x2")
_SHORT = 2.0  # decades of x below which a floor E and an exponent can hardly be told apart
_MIXED = 10.0  # how much smaller the scatter must become when the large values are read as percent


class FitRefused(UserError):
    """A fit that must not be made. ``code`` is one of REFUSALS; ``missing`` names the columns that are not there."""

    def __init__(self, code: str, message: str, missing: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.code, self.missing = code, list(missing)


@dataclass(frozen=True)
class Caution:
    """A warning with its code."""

    code: str
    message: str


@dataclass(frozen=True)
class Dropped:
    """A row that was left out: its number (the first row of data is 1) and why."""

    row: int
    reason: str


@dataclass(frozen=True)
class Screened:
    """What is left for the fit, and what was said on the way."""

    points: Points
    dropped: tuple[Dropped, ...]
    cautions: tuple[Caution, ...]
    n_rows: int


def screen(
    x: Array,
    y: Array,
    *,
    x2: Array | None = None,
    sigma: Array | None = None,
    rows: Sequence[int] | None = None,
    unit: str | None = None,
    names: tuple[str, str, str] = NAMES,
    n_rows: int | None = None,
    params: int = 2,
) -> Screened:
    """Leave out rows without finite positive numbers, convert percent to fractions, and look for what is amiss.

    ``rows`` are the numbers of the rows, ``params`` how many parameters must be determined. Raises FitRefused.
    """
    if unit is not None and unit not in UNITS:
        raise unknown("unit", unit, UNITS, "give --unit fraction, percent or loss")
    rows = list(range(1, len(x) + 1)) if rows is None else list(rows)
    keep, dropped, cautions = _positive(x, y, x2, sigma, rows, names)
    total = len(rows) if n_rows is None else n_rows
    if not keep.any():
        raise FitRefused("no_positive_rows", f"none of {total} rows has a finite positive {names[0]} and {names[1]}")
    second, spread = (None if c is None else c[keep] for c in (x2, sigma))
    points = Points.of(x[keep], y[keep], second, spread, np.array(rows)[keep])
    cautions += _units(points, unit, names[1])
    if unit == "percent":
        points = replace(points, y=points.y / 100)
    enough(points, params, names[0], names[2])
    return Screened(points, tuple(dropped), tuple(cautions + _shape(points, names)), total)


def _positive(
    x: Array, y: Array, x2: Array | None, sigma: Array | None, rows: list[int], names: tuple[str, str, str]
) -> tuple[Array, list[Dropped], list[Caution]]:
    columns: dict[str, Array | None] = {names[0]: x, names[1]: y, names[2]: x2, "sigma": sigma}
    keep, dropped = np.ones(len(x), dtype=bool), []
    counts = {"dropped_nonfinite": 0, "dropped_nonpositive": 0}
    for i, row in enumerate(rows):
        values = {name: c[i] for name, c in columns.items() if c is not None}
        wild = [n for n, v in values.items() if not np.isfinite(v)]
        low = [n for n, v in values.items() if np.isfinite(v) and v <= 0]
        if wild or low:
            keep[i] = False
            counts["dropped_nonfinite" if wild else "dropped_nonpositive"] += 1
            name = (wild or low)[0]
            reason = "is missing or not a finite number" if wild else f"= {values[name]:g} is not positive"
            dropped.append(Dropped(row, f"{name} {reason}"))
    said = [Caution(code, _which(code, count, dropped)) for code, count in counts.items() if count]
    return keep, dropped, said


def _which(code: str, count: int, dropped: list[Dropped]) -> str:
    wild = code == "dropped_nonfinite"
    rows = [str(d.row) for d in dropped if ("finite" in d.reason) == wild]
    listed = ", ".join(rows[:10]) + (", …" if len(rows) > 10 else "")
    return f"{count} row(s) left out: {'not finite' if wild else 'not positive'} (rows {listed})"


def enough(points: Points, params: int, x_name: str, x2_name: str = "x2") -> None:
    """Raise FitRefused unless the points can determine ``params`` parameters."""
    distinct = len(np.unique(points.x if points.x2 is None else np.stack([points.x, points.x2]), axis=-1).T)
    for name, column in ((x_name, points.x), (x2_name, points.x2)):
        if column is not None and points.n > 1 and len(np.unique(column)) == 1:
            raise FitRefused(
                "single_x", f"all {points.n} points have {name} = {column[0]:g}; a law needs several sizes"
            )
    if distinct < params:
        raise FitRefused(
            "insufficient_points",
            f"{distinct} distinct {x_name} for {params} parameters; add sizes or choose a form with fewer parameters",
        )


def _units(points: Points, unit: str | None, name: str) -> list[Caution]:
    if unit != "loss" and _reads_as_mixed(points):
        raise FitRefused(
            "mixed_units", f"{name} mixes fractions and percent (values above 1 fit as percent); convert one"
        )
    top = points.y.max()
    if unit == "fraction" and top > 1:
        return [
            Caution(
                "unit_mismatch",
                f"{name} is declared a fraction but reaches {top:g}; A and E are off by 100 if it is percent",
            )
        ]
    if unit == "percent" and top <= 1:
        return [
            Caution("unit_mismatch", f"{name} is declared percent but never exceeds {top:g}; it looks like a fraction")
        ]
    if unit == "percent" and top > 100:
        return [Caution("unit_mismatch", f"{name} is declared percent but reaches {top:g}")]
    return []


def _reads_as_mixed(points: Points) -> bool:
    """Whether reading the values above 1 as percent, and only those, removes nearly all scatter about a power law."""
    large = points.y > 1
    if not 0 < large.sum() < points.n or points.n < 4 or points.x2 is not None:
        return False
    as_is, read = (_scatter(np.log(points.x), np.log(y)) for y in (points.y, np.where(large, points.y / 100, points.y)))
    return as_is > 1.0 and as_is > _MIXED * read


def _scatter(u: Array, v: Array) -> float:
    if np.ptp(u) == 0:
        return 0.0
    return float(np.std(v - np.polyval(np.polyfit(u - u.mean(), v, 1), u - u.mean())))


def _shape(points: Points, names: tuple[str, str, str]) -> list[Caution]:
    said, (x_name, y_name, x2_name) = [], names
    for name, column in ((x_name, points.x), (x2_name, points.x2)):
        decades = 9.0 if column is None else float(np.log10(column.max() / column.min()))
        if decades < _SHORT - 1e-9:
            said.append(
                Caution(
                    "short_range",
                    f"{name} spans {decades:.2f} decades; under 2 a floor cannot be told from an exponent",
                )
            )
    pairs = np.stack([points.x] if points.x2 is None else [points.x, points.x2], axis=1)
    _, counts = np.unique(pairs, axis=0, return_counts=True)
    if counts.max() > 1:
        said.append(
            Caution(
                "duplicate_x", f"{int((counts > 1).sum())} sizes occur more than once; all rows are kept as replicates"
            )
        )
    v = np.log(points.y)
    if np.ptp(v) <= 1e-12 * max(1.0, float(np.abs(v).max())):
        return [
            *said,
            Caution("degenerate_y", f"every {y_name} is {points.y[0]:g}; the exponent is 0 and says nothing"),
        ]
    design = np.log(pairs) - np.log(pairs).mean(axis=0)
    slopes = np.linalg.lstsq(design, v - v.mean(), rcond=None)[0]
    if (slopes > 0).any():
        hint = "; if it is an accuracy, fit the error 1 - accuracy" if points.y.max() <= 100 else ""
        said.append(Caution("increasing_y", f"{y_name} rises with size, a scaling law falls{hint}"))
    return said
