"""Fit one scaling law to points: ``fit_law(x, y, form)`` gives a ``Law`` with intervals and its own doubts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import t as t_dist

from clip_linear_eval.fit_diagnose import diagnose
from clip_linear_eval.fit_intervals import LEVEL, Interval, covariance, law_intervals, scale
from clip_linear_eval.fit_optimize import Problem
from clip_linear_eval.fit_screen import Caution, Dropped, FitRefused, screen
from clip_linear_eval.fit_solve import robust_delta, solve
from clip_linear_eval.laws import EXPONENTS, Array, Form, Points, get_form

__all__ = ["FitRefused", "Law", "fit_law"]


@dataclass(frozen=True, kw_only=True)
class Law:
    """A fitted law.

    ``params`` are natural (A, alpha, E, …); ``se`` belongs to them, ``cov`` to θ (logs of all but the exponents,
    see ``cov_of``); an interval's end is None where the data set none. Errors are fractions.
    """

    form: str
    objective: str
    n: int
    n_rows: int
    cost: float
    params: dict[str, float]
    ci95: dict[str, Interval] | None
    interval_method: str | None
    se: dict[str, float | None]
    cov: list[list[float]] | None
    cov_of: list[str]
    sigma: float | None
    delta: float | None
    dof: int
    aicc: float | None
    bic: float | None
    loo: float | None
    identified: dict[str, bool | None]
    without_outlier: dict[str, Any] | None
    certificate: dict[str, Any]
    lack_of_fit: dict[str, float] | None
    x_range: tuple[float, float]
    noise_unit: float = 1.0  # weighted fits: sigma of the typical point, of which ``sigma`` is a multiple
    predictions: list[dict[str, Any]] = field(default_factory=list)
    warnings: tuple[Caution, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    points: Points = field(repr=False, compare=False)

    @property
    def theta(self) -> Array:
        return get_form(self.form).theta(self.params)

    def predict(self, x: ArrayLike, x2: ArrayLike | None = None) -> Array:
        """y of the law (its median) at x, and x2 for ``chinchilla``."""
        return np.exp(self._log_y(x, x2)[0])

    def band(
        self, x: ArrayLike, x2: ArrayLike | None = None, *, prediction: bool = False
    ) -> tuple[Array, Array] | None:
        """95 % limits of the law at x, with ``prediction`` of a new measurement; None without degrees of freedom."""
        if self.cov is None or self.dof < 1 or self.sigma is None:
            return None
        log_y, jac = self._log_y(x, x2)
        var = np.maximum(np.einsum("ni,ij,nj->n", jac, np.array(self.cov), jac), 0.0)
        half = t_dist.ppf((1 + LEVEL) / 2, self.dof) * np.sqrt(
            var + (self.log_noise(np.exp(log_y)) ** 2 if prediction else 0)
        )
        return np.exp(log_y - half), np.exp(log_y + half)

    def log_noise(self, y: Array) -> Array:
        """Standard deviation of ln y about the law, at values y of the law (weighted fits: at the typical weight)."""
        assert self.sigma is not None
        if self.objective == "linear":
            return self.sigma / y
        return np.full_like(y, self.sigma * self.noise_unit)

    def local_slope(self, x: ArrayLike) -> Array:
        """−d ln y / d ln x: the exponent that a pure power law would show near x."""
        x = np.asarray(x, dtype=float)
        h = 1e-5
        return (np.log(self.predict(x * np.exp(-h))) - np.log(self.predict(x * np.exp(h)))) / (2 * h)

    def to_json(self) -> dict[str, Any]:
        """The group's entry in fit.json."""
        whole = {k: v for k, v in asdict(replace(self, points=Points.of([1.0], [1.0]))).items() if k != "points"}
        whole.pop("dropped")
        whole.pop("warnings")
        return whole

    @classmethod
    def from_json(cls, group: dict[str, Any], points: Points | None = None) -> Law:
        """A law from a group's entry in fit.json, to predict and draw bands with; ``points`` only to fit further."""
        known = {f.name for f in fields(cls)} - {"points"}
        return cls(**{k: v for k, v in group.items() if k in known}, points=points or Points.of([1.0], [1.0]))

    def _log_y(self, x: ArrayLike, x2: ArrayLike | None) -> tuple[Array, Array]:
        x, z = np.broadcast_arrays(
            np.atleast_1d(np.asarray(x, dtype=float)), 1.0 if x2 is None else np.asarray(x2, float)
        )
        return get_form(self.form).log_y_jac(self.theta, x, z)


def fit_law(
    x: ArrayLike,
    y: ArrayLike,
    form: str = "power",
    *,
    x2: ArrayLike | None = None,
    objective: str = "gaussian",
    sigma: ArrayLike | None = None,
    unit: str | None = None,
    predict: Sequence[float] = (),
    rows: Sequence[int] | None = None,
    names: tuple[str, str] = ("x", "y"),
) -> Law:
    """Fit ``form`` to positive points; ``x2`` is the second factor of ``chinchilla``, ``sigma`` the sd of ln y.

    ``unit`` (fraction, percent, loss) declares y; percent becomes a fraction. Raises FitRefused (a ValueError with a
    ``code``) where no fit should be made, and lists doubts in ``Law.warnings``.
    """
    shape = get_form(form)
    if (x2 is not None) != (form == "chinchilla"):
        raise FitRefused("missing_column", "form 'chinchilla', and only it, takes a second factor; give x2", ["x2"])
    if sigma is not None and objective not in ("gaussian", "huber"):
        raise FitRefused("missing_column", f"objective {objective!r} takes no sigma; use gaussian or huber")
    columns = [_array(x), _array(y)]
    second, spread = (None if c is None else _array(c) for c in (x2, sigma))
    seen = screen(*columns, x2=second, sigma=spread, rows=rows, unit=unit, names=names, params=shape.k)
    law = fit_points(seen.points, shape, objective, predict=predict)
    return replace(law, n_rows=seen.n_rows, dropped=seen.dropped, warnings=seen.cautions + law.warnings)


def _array(values: ArrayLike) -> Array:
    return np.asarray(values, dtype=float).ravel()


def fit_points(points: Points, form: Form, objective: str = "gaussian", predict: Sequence[float] = ()) -> Law:
    """Fit clean points (see ``fit_law``)."""
    problem = Problem(form, points, objective)
    if objective == "huber":
        problem = problem.like("huber", robust_delta(problem))
    solution = solve(problem)
    found = diagnose(problem, solution)
    dof = points.n - form.k
    s2 = scale(problem, solution, dof)
    cov = None if s2 is None else covariance(problem, solution, s2)
    ci95 = None if s2 is None or cov is None else law_intervals(problem, solution, cov, s2, dof)
    params = form.natural(solution.theta)
    law = Law(
        form=form.name,
        objective=objective,
        n=points.n,
        n_rows=points.n,
        cost=solution.cost,
        params=params,
        ci95=ci95,
        interval_method=None
        if ci95 is None
        else "t"
        if form.name == "power" and objective != "linear"
        else "profile-F",
        se=_standard_errors(form, params, cov),
        cov=None if cov is None else cov.tolist(),
        cov_of=[p if p in EXPONENTS else f"ln {p}" for p in form.params],
        sigma=found.sigma,
        delta=problem.delta,
        dof=dof,
        aicc=found.aicc,
        bic=found.bic,
        loo=found.loo,
        identified=_identified(form, ci95),
        without_outlier=_without(problem, found.outliers),
        certificate=solution.certificate,
        lack_of_fit=found.lack_of_fit,
        x_range=(float(points.x.min()), float(points.x.max())),
        noise_unit=1.0 if points.sigma is None else float(np.exp(np.mean(np.log(points.sigma)))),
        points=points,
    )
    law = replace(law, warnings=tuple(_doubts(law, points, found.outliers)))
    return replace(law, predictions=[prediction(law, v) for v in predict])


def prediction(law: Law, x: float, x2: float | None = None) -> dict[str, Any]:
    """The law at x with its confidence and prediction limits; ``extrapolated`` outside the data."""
    limits = [law.band(x, x2), law.band(x, x2, prediction=True)]
    ends = [None if b is None else [float(b[0][0]), float(b[1][0])] for b in limits]
    inside = law.x_range[0] <= x <= law.x_range[1]
    return {
        "x": float(x),
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


def _identified(form: Form, ci95: dict[str, Interval] | None) -> dict[str, bool | None]:
    """Whether an interval is finite and keeps clear of its bound; None where there is no interval to judge by."""
    if ci95 is None:
        return dict.fromkeys(form.params)
    return {p: lo is not None and hi is not None and (lo > 0 or p in EXPONENTS) for p, (lo, hi) in ci95.items()}


def _without(problem: Problem, outliers: tuple[int, ...]) -> dict[str, Any] | None:
    kept = np.ones(problem.n, dtype=bool)
    kept[list(outliers)] = False
    if not outliers or len(np.unique(problem.points.x[kept])) < problem.k:
        return None
    again = Problem(problem.form, problem.points.take(kept), problem.objective, problem.delta)
    law = solve(again)
    at = [[float(problem.points.x[i]), float(problem.points.y[i])] for i in outliers]
    return {**problem.form.natural(law.theta), "n": int(kept.sum()), "left_out": at}


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
        said.append(Caution("outlier", f"the point at x = {at} does not belong to the law; see without_outlier"))
    floor = law.params.get("E")
    if floor is not None and law.identified["E"] is not True and (law.ci95 is not None or floor == 0):
        top = None if law.ci95 is None else law.ci95["E"][1]
        until = "" if top is None else f" (95 % interval 0 to {top:.4g})"
        said.append(Caution("E_not_identified", f"these data do not tell the floor E from 0{until}"))
    if not law.certificate["ok"]:
        said.append(Caution("no_certificate", "the optimum is not certified: starts disagree or a restart still gains"))
    return said


def problem_of(law: Law) -> Problem:
    """The law's minimisation, to go on from it."""
    return Problem(get_form(law.form), law.points, law.objective, law.delta)
