"""Intervals of parameters: Student t where the law is linear, F-calibrated profiles elsewhere.

A profile interval holds every value v of a parameter for which the best law with that value costs at most
``cost_min + s² F(level; 1, dof) / 2``. Unlike an interval from a covariance it can reach a bound, such as E = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import brentq
from scipy.stats import f as f_dist
from scipy.stats import t as t_dist

from clip_linear_eval.fit_optimize import Objective, Problem
from clip_linear_eval.fit_solve import Solution
from clip_linear_eval.laws import EXPONENTS, Array

LEVEL = 0.95
Interval = tuple[float | None, float | None]  # None: the interval has no end on this side
_FAR = 60.0  # an exponent, or a change of ln A, beyond which an interval counts as endless
_EXACT = 1e-10  # relative residuals below this are rounding: the profile of such a fit is a point


def scale(problem: Objective, solution: Solution, dof: int) -> float | None:
    """The residual variance s² that turns the rise of the cost into an F statistic; None if it cannot be known.

    Least squares: RSS/dof. Huber: Σψ²/dof divided by the mean of ψ' (Ronchetti's τ-test). Nothing for L1 and for the
    nearly-L1 ``chinchilla`` objective: their curvature at the optimum says little; they need a bootstrap.
    """
    if dof < 1 or problem.objective in ("l1", "chinchilla"):
        return None
    r, _ = problem.residuals(solution.theta)
    if problem.delta is None:
        return float(r @ r / dof)
    psi = np.clip(r, -problem.delta, problem.delta)
    inside = float((np.abs(r) <= problem.delta).mean())
    return float(psi @ psi / dof / inside) if inside > 0.1 else None


def covariance(problem: Objective, solution: Solution, s2: float, free: list[int] | None = None) -> Array:
    """Covariance of θ from the Jacobian, zero in the rows and columns of parameters that are held."""
    free = solution.free if free is None else free
    r, jac = problem.residuals(solution.theta)
    jac = jac[:, free]
    if not np.isfinite(jac).all():
        return np.full((problem.k, problem.k), np.inf)
    norm = np.linalg.norm(jac, axis=0)
    norm[norm == 0] = 1.0
    inverse = np.linalg.pinv((jac / norm).T @ (jac / norm), rcond=1e-14, hermitian=True)
    spread = s2 if problem.delta is None else s2 / float((np.abs(r) <= problem.delta).mean())
    cov = np.zeros((problem.k, problem.k))
    cov[np.ix_(free, free)] = spread * inverse / np.outer(norm, norm)
    return cov


def t_interval(center: float, se: float, dof: int) -> tuple[float, float]:
    half = float(t_dist.ppf((1 + LEVEL) / 2, dof)) * se
    return float(center - half), float(center + half)


def law_intervals(
    problem: Problem, solution: Solution, cov: Array, s2: float, dof: int, wanted: Sequence[str] | None = None
) -> dict[str, Interval]:
    """95 % intervals of the natural parameters of a law: exact t for ``power``, else profiles."""
    form = problem.form
    linear = form.name == "power" and problem.objective != "linear"
    found: dict[str, Interval] = {}
    for j, param in enumerate(form.params):
        if wanted is not None and param not in wanted:
            continue
        se = float(np.sqrt(cov[j, j]))
        lo: float | None
        hi: float | None
        if linear or s2 < _EXACT**2:
            lo, hi = t_interval(solution.theta[j], se, dof)
        elif param in form.zeroable:
            unit = float((problem.points.y if param == "E" else problem.points.x).min())
            found[param] = profile_of_coefficient(problem, solution, j, s2, dof, unit)
            continue
        else:
            lo, hi = profile(problem, solution, j, s2, dof, se)
        if param not in EXPONENTS:
            lo, hi = 0.0 if lo is None else float(np.exp(lo)), None if hi is None else float(np.exp(hi))
        found[param] = (lo, hi)
    return found


def profile(problem: Objective, solution: Solution, j: int, s2: float, dof: int, se: float) -> Interval:
    """The profile interval of θ[j]; an end further than 60 away counts as none."""
    half = float(t_dist.ppf((1 + LEVEL) / 2, dof)) * se
    center = float(solution.theta[j])
    step = half if np.isfinite(half) and 0 < half < _FAR / 8 else 1e-2 * max(abs(center), 1.0)
    below, above = (_excess(problem, solution, j, center, s2, dof) for _ in range(2))
    return _walk(below, center, -step, center - _FAR), _walk(above, center, step, center + _FAR)


def profile_of_coefficient(
    problem: Objective, solution: Solution, j: int, s2: float, dof: int, unit: float
) -> tuple[float, float | None]:
    """The profile interval of a coefficient exp(θ[j]) that may vanish: it ends at 0 if the smaller law is allowed."""

    def log(v: float) -> float:
        return float(np.log(v)) if v > 0 else -np.inf

    center = float(np.exp(solution.theta[j]))
    below, above = (_excess(problem, solution, j, center, s2, dof, log) for _ in range(2))
    lo = 0.0
    if center > 0 and below(0.0) > 0:
        lo = float(brentq(below, 0.0, center, xtol=1e-10 * center, rtol=1e-10))
    return lo, _walk(above, center, 0.1 * center if center > 1e-3 * unit else 0.01 * unit, 1e30 * unit)


def _excess(
    problem: Objective,
    solution: Solution,
    j: int,
    center: float,
    s2: float,
    dof: int,
    to_theta: Callable[[float], float] = float,
) -> Callable[[float], float]:
    """√(rise of the cost) − √(its limit) with θ[j] held at to_theta(v): about linear, and 0 at the interval's end."""
    limit = np.sqrt(s2 * float(f_dist.ppf(LEVEL, 1, dof)) / 2)
    rest = [i for i in range(problem.k) if i != j]
    known = {center: (solution.theta, solution.cost)}

    def excess(v: float) -> float:
        if v not in known:
            start = known[min(known, key=lambda u: abs(u - v))][0].copy()
            start[j] = to_theta(v)
            known[v] = problem.settle(start, rest, rough=True)
        return float(np.sqrt(max(known[v][1] - solution.cost, 0.0)) - limit)

    return excess


def _walk(excess: Callable[[float], float], center: float, step: float, far: float) -> float | None:
    """Walk from the optimum until the profile has risen above its limit, then find where it crosses it."""
    inner = center
    for _ in range(200):
        outer = inner + step
        if (outer - far) * step > 0:
            return None
        if excess(outer) > 0:
            return float(brentq(excess, inner, outer, xtol=1e-10 * max(abs(outer), 1e-6), rtol=1e-10))
        inner, step = outer, step * 1.6
    return None
