"""Fit one form to clean points, and say what is doubtful about the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from clip_linear_eval.fit_diagnose import diagnose
from clip_linear_eval.fit_intervals import Interval, covariance, law_intervals, scale
from clip_linear_eval.fit_optimize import Problem
from clip_linear_eval.fit_screen import Caution
from clip_linear_eval.fit_solve import robust_delta, solve
from clip_linear_eval.laws import EXPONENTS, Array, Form, Points, quiet
from clip_linear_eval.laws_fitted import Law


@quiet
def fit_points(
    points: Points,
    form: Form,
    objective: str = "gaussian",
    predict: Sequence[Any] = (),
    intervals: Sequence[str] | None = None,
) -> Law:
    """Fit clean points (see ``fit_law``)."""
    problem = Problem(form, points, objective)
    if objective == "huber":
        problem = problem.like("huber", robust_delta(problem))
    solution = solve(problem)
    found = diagnose(problem, solution)
    dof = points.n - form.k
    s2 = scale(problem, solution, dof)
    cov = None if s2 is None else covariance(problem, solution, s2)
    ci95 = None if s2 is None or cov is None else law_intervals(problem, solution, cov, s2, dof, intervals)
    method = "t" if form.name == "power" and objective != "linear" else "profile-F"
    params = form.natural(solution.theta)
    law = Law(
        form=form.name,
        objective=objective,
        n=points.n,
        n_rows=points.n,
        cost=solution.cost,
        params=params,
        log_params=tuple(float(t) for t in solution.theta),
        ci95=ci95,
        interval_method=None if ci95 is None else method,
        se=_standard_errors(form, params, cov),
        cov=None if cov is None else cov.tolist(),
        cov_of=[p if p in EXPONENTS else f"ln {p}" for p in form.params],
        sigma=found.sigma,
        delta=problem.delta,
        dof=dof,
        aicc=found.aicc,
        bic=found.bic,
        loo=found.loo,
        identified=identified(form, ci95),
        without_outlier=_without(problem, found.outliers),
        certificate=solution.certificate,
        lack_of_fit=found.lack_of_fit,
        x_range=(float(points.x.min()), float(points.x.max())),
        y_range=(float(points.y.min()), float(points.y.max())),
        noise_unit=1.0 if points.sigma is None else float(np.exp(np.mean(np.log(points.sigma)))),
        points=points,
    )
    law = replace(law, warnings=tuple(_doubts(law, points, found.outliers)))
    return replace(law, predictions=[prediction(law, *np.atleast_1d(v)) for v in predict])


def prediction(law: Law, x: float, x2: float | None = None) -> dict[str, Any]:
    """The law at x with its confidence and prediction limits; ``extrapolated`` outside the data."""
    limits = [law.band(x, x2), law.band(x, x2, prediction=True)]
    ends = [None if b is None else [float(b[0][0]), float(b[1][0])] for b in limits]
    inside = law.x_range[0] <= x <= law.x_range[1]
    return {
        "x": float(x),
        "x2": None if x2 is None else float(x2),
        "y": float(law.predict(x, x2)[0]),
        "ci95": ends[0],
        "pi95": ends[1],
        "extrapolated": not inside,
    }


def _standard_errors(form: Form, params: dict[str, float], cov: Array | None) -> dict[str, float | None]:
    if cov is None:
        return dict.fromkeys(form.params)
    root = np.sqrt(np.diag(cov))
    return {p: float(s if p in EXPONENTS else params[p] * s) for p, s in zip(form.params, root)}


def identified(form: Form, ci95: dict[str, Interval] | None) -> dict[str, bool | None]:
    """Whether an interval is finite and keeps clear of its bound; None where there is no interval to judge by."""
    if ci95 is None:
        return dict.fromkeys(form.params)
    judged = {p: lo is not None and hi is not None and (lo > 0 or p in EXPONENTS) for p, (lo, hi) in ci95.items()}
    return {p: judged.get(p) for p in form.params}


def _without(problem: Problem, outliers: tuple[int, ...]) -> dict[str, Any] | None:
    kept = np.ones(problem.n, dtype=bool)
    kept[list(outliers)] = False
    if not outliers or len(np.unique(problem.points.x[kept])) < problem.k:
        return None
    again = Problem(problem.form, problem.points.take(kept), problem.objective, problem.delta)
    law = solve(again)
    rows = problem.points.row
    left_out = [
        {
            "x": float(problem.points.x[i]),
            "y": float(problem.points.y[i]),
            "row": None if rows is None else int(rows[i]),
        }
        for i in outliers
    ]
    return {**problem.form.natural(law.theta), "n": int(kept.sum()), "left_out": left_out}


def _doubts(law: Law, points: Points, outliers: tuple[int, ...]) -> list[Caution]:
    said = []
    if law.dof < 1:
        said.append(
            Caution(
                "zero_dof", f"{law.n} points for {len(law.params)} parameters: a curve through the points, no interval"
            )
        )
    if outliers:
        at = ", ".join(f"{points.x[i]:.4g}" for i in outliers)
        said.append(Caution("outlier", f"{len(outliers)} point(s) far off the law, at x = {at}; see the fit without"))
    floor = law.params.get("E")
    if floor is not None and (law.identified["E"] is False or floor == 0):
        top = None if law.ci95 is None or "E" not in law.ci95 else law.ci95["E"][1]
        until = "" if top is None else f" (95 % interval 0 to {top:.4g})"
        said.append(Caution("E_not_identified", f"these data do not tell the floor E from 0{until}"))
    if not law.certificate["ok"]:
        said.append(Caution("no_certificate", "the optimum is not certified: starts disagree or a restart still gains"))
    return said
