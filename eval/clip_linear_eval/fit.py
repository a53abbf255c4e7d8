"""Fit one scaling law to points: ``fit_law(x, y, form)`` gives a ``Law`` with intervals and its own doubts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from clip_linear_eval import frontier
from clip_linear_eval.fit_bootstrap import bootstrap
from clip_linear_eval.fit_intervals import Interval
from clip_linear_eval.fit_points import fit_points, identified, prediction
from clip_linear_eval.fit_screen import NAMES, Dropped, FitRefused, Screened, enough, screen
from clip_linear_eval.fit_select import check_split, choose_form, split
from clip_linear_eval.laws import Array, Form, Points, get_form
from clip_linear_eval.laws_fitted import Law, plain

__all__ = ["FitRefused", "Law", "Options", "fit_law"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to fit. ``predict`` holds x, or (x, x2) for ``chinchilla``; ``hold_out`` is a number of the largest sizes."""

    form: str = "power"
    objective: str = "gaussian"
    frontier: str = "none"
    predict: tuple[Any, ...] = ()
    hold_out: int = 0
    bootstrap: int = 0
    seed: int = 0
    intervals: tuple[str, ...] | None = None  # parameters that get one; None: all


def fit_law(
    x: ArrayLike,
    y: ArrayLike,
    form: str = "power",
    *,
    x2: ArrayLike | None = None,
    objective: str = "gaussian",
    sigma: ArrayLike | None = None,
    unit: str | None = None,
    frontier: str = "none",
    predict: Sequence[Any] = (),
    hold_out: int = 0,
    bootstrap: int = 0,
    seed: int = 0,
    runs: ArrayLike | None = None,
    intervals: Sequence[str] | None = None,
    rows: Sequence[int] | None = None,
    names: tuple[str, str, str] = NAMES,
) -> Law:
    """Fit ``form`` (power, saturating, shifted, chinchilla, auto) to points.

    x, y: [n], positive (other points are left out and listed); x2: the second factor of ``chinchilla``; sigma: the sd
    of ln y, as relative weights; unit: fraction, percent (becomes a fraction) or loss; frontier: which points count
    (none, pareto, cherti, nezhurina); predict: where to predict; hold_out: predict this many of the largest sizes from
    the rest; bootstrap: resamples of ``runs`` (labels [n]; each point by itself if None) with ``seed``; intervals: the
    parameters that need one (None: all). Raises FitRefused, a ValueError with a ``code``, where no fit should be made;
    doubts are in ``Law.warnings``.
    """
    options = Options(
        form=form,
        objective=objective,
        frontier=frontier,
        predict=tuple(predict),
        hold_out=hold_out,
        bootstrap=bootstrap,
        seed=seed,
        intervals=None if intervals is None else tuple(intervals),
    )
    second, spread = (None if c is None else _array(c) for c in (x2, sigma))
    seen = screen_for(options, _array(x), _array(y), x2=second, sigma=spread, rows=rows, unit=unit, names=names)
    if form == "auto":
        points = select_points(seen.points, options, names[0])
        chosen, table = choose_form([points], objective, unit in ("fraction", "percent"))
        law = fit_screened(seen, replace(options, form=chosen), names[0], _labels(seen, runs, rows))
        return replace(law, selection=table)
    return fit_screened(seen, options, names[0], _labels(seen, runs, rows))


def _array(values: ArrayLike) -> Array:
    return np.asarray(values, dtype=float).ravel()


def _labels(seen: Screened, runs: ArrayLike | None, rows: Sequence[int] | None) -> dict[int, str] | None:
    if runs is None:
        return None
    names = [str(r) for r in np.asarray(runs).ravel()]
    return dict(zip(range(1, len(names) + 1) if rows is None else rows, names))


def screen_for(options: Options, x: Array, y: Array, **columns: Any) -> Screened:
    """``screen`` for these options: the form says how many parameters there are and whether x2 belongs to it."""
    form = get_form("power" if options.form in ("auto", "isoflop") else options.form)
    second = options.form in ("chinchilla", "isoflop")
    if (columns.get("x2") is not None) != second:
        raise FitRefused("missing_column", "form 'chinchilla', and only it, takes a second factor; give x2", ["x2"])
    if columns.get("sigma") is not None and options.objective not in ("gaussian", "huber"):
        raise FitRefused("missing_column", f"objective {options.objective!r} takes no sigma; use gaussian or huber")
    return screen(x, y, params=form.k, **columns)


def select_points(points: Points, options: Options, x_name: str) -> Points:
    """The points on the frontier. Raises FitRefused if too few are left."""
    choose = frontier.rule(options.frontier, x_name)
    if choose is None:
        return points
    chosen = choose(points)
    enough(chosen, get_form("power" if options.form == "auto" else options.form).k, f"{x_name} on the frontier")
    return chosen


def fit_screened(seen: Screened, options: Options, x_name: str, runs: dict[int, str] | None = None) -> Law:
    """Fit screened points under all options; ``runs`` maps row numbers to the run that they belong to."""
    form = get_form(options.form)
    points = select_points(seen.points, options, x_name)
    law = fit_points(points, form, options.objective, options.predict, options.intervals)
    law = replace(law, n_rows=seen.n_rows, dropped=seen.dropped, warnings=seen.cautions + law.warnings)
    if points is not seen.points:
        law = replace(law, frontier=options.frontier, dropped=law.dropped + _off(seen.points, points, options.frontier))
    if options.hold_out:
        law = replace(law, hold_out=held_out(points, form, options))
    return _with_bootstrap(law, seen.points, options, x_name, runs) if options.bootstrap else law


def _off(all_points: Points, chosen: Points, name: str) -> tuple[Dropped, ...]:
    if all_points.row is None or chosen.row is None:
        return ()
    kept = set(chosen.row.tolist())
    return tuple(Dropped(int(r), f"not on the frontier ({name})") for r in sorted(all_points.row) if r not in kept)


def held_out(points: Points, form: Form, options: Options) -> dict[str, Any]:
    """The largest sizes predicted from the rest. Raises FitRefused if the rest is too little."""
    check_split(points, form, options.hold_out)
    train, test = split(points, options.hold_out)
    law = fit_points(train, form, options.objective)
    found = [prediction(law, x, None if test.x2 is None else float(test.x2[i])) for i, x in enumerate(test.x)]
    told = [
        {**p, "measured": float(y), "inside": None if p["pi95"] is None else bool(p["pi95"][0] <= y <= p["pi95"][1])}
        for p, y in zip(found, test.y)
    ]
    off = np.log(test.y) - np.log([p["y"] for p in found])
    return {
        "largest": options.hold_out,
        "n_fit": train.n,
        "params": law.params,
        "points": told,
        "rms_log": float(np.sqrt(np.mean(off**2))),
    }


def _with_bootstrap(law: Law, points: Points, options: Options, x_name: str, runs: dict[int, str] | None) -> Law:
    """Add the bootstrap; it becomes the interval of robust objectives and of frontiers, which have no better one."""
    labels = None
    if runs is not None and points.row is not None:
        labels = np.array([runs[int(r)] for r in points.row])
    found = bootstrap(
        points,
        get_form(law.form),
        law.objective,
        law.theta,
        draws=options.bootstrap,
        seed=options.seed,
        delta=law.delta,
        choose=frontier.rule(options.frontier, x_name),
        clusters=labels,
    )
    if found is None:
        return replace(law, bootstrap={"draws": options.bootstrap, "seed": options.seed, "failed": options.bootstrap})
    told = plain(found.to_json())
    law = replace(law, bootstrap=told)
    if law.ci95 is not None and options.frontier == "none":
        return law
    ends: dict[str, Interval] = told["ci95"]
    cov = np.cov(found.theta.T) if np.isfinite(found.theta).all() else None
    return replace(
        law,
        ci95=ends,
        interval_method="bootstrap" if options.frontier == "none" else "bootstrap, frontier selected in every draw",
        se=told["se"],
        cov=None if cov is None else np.atleast_2d(cov).tolist(),
        identified=identified(get_form(law.form), ends),
    )
