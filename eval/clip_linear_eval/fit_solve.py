"""The global minimum of a law's objective: scale-free starts, the best minimum, and a certificate for it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from clip_linear_eval.fit_l1 import minimise_l1
from clip_linear_eval.fit_optimize import Objective, Problem, ols
from clip_linear_eval.laws import Array, Form, Points


@dataclass(frozen=True)
class Solution:
    """The best point found: θ (−inf for coefficients at zero), its cost and the certificate."""

    theta: Array
    cost: float
    certificate: dict[str, Any]

    @property
    def free(self) -> list[int]:
        """Indices of the parameters that are not held at zero."""
        return [j for j, t in enumerate(self.theta) if t > -np.inf]


def solve(problem: Problem, near: Array | None = None) -> Solution:
    """The minimum over many starts, certified; with ``near`` only from that θ, uncertified (for resampling)."""
    if problem.form.name == "power" and problem.objective == "gaussian":
        a, slope = ols(np.log(problem.points.x), problem.log_y, problem.weight)
        theta = np.array([a, -slope])
        return Solution(theta, problem.cost(theta), {"ok": True, "method": "closed form (least squares)"})
    everything = range(problem.k)
    if near is not None:
        return Solution(*problem.settle(near, everything, rough=True), {})
    smooth = problem if problem.objective == "linear" else problem.like("gaussian")
    begin = starts(problem.form, problem.points, problem.weight)
    runs = _sorted([smooth.minimise(theta, everything) for theta in begin])
    if smooth.objective != problem.objective:
        runs = _robust_runs(problem, begin, runs[0][0])
    theta, cost = problem.settle(runs[0][0], everything, thorough=True)
    return Solution(theta, cost, _certificate(problem, theta, cost, runs, len(begin)))


def _sorted(runs: list[tuple[Array, float]]) -> list[tuple[Array, float]]:
    return sorted((r for r in runs if np.isfinite(r[1])), key=lambda r: r[1])


def _robust_runs(problem: Problem, begin: list[Array], smooth: Array) -> list[tuple[Array, float]]:
    """Minima of a robust objective, from the Gaussian minimum by continuation and from every start directly.

    An outlier can carry the Gaussian minimum into another valley (a floor of 0, say), so that alone would not do.
    L1 is sought with a narrow Huber and finished by linear programmes.
    """
    everything = range(problem.k)
    last = problem.delta or max(0.1 * float(np.median(np.abs(problem.residuals(smooth)[0]))), 1e-9)
    huber = problem.like("huber", last)
    found = [huber.minimise(theta, everything, rough=True) for theta in begin]
    for delta in [*(d for d in (1.0, 0.1, 0.01) if d > last), last]:
        smooth = problem.like("huber", delta).minimise(smooth, everything, rough=True)[0]
    best = _sorted([(smooth, huber.cost(smooth)), *found])[:3]
    return _sorted([problem.minimise(theta, everything) for theta, _ in best])


def robust_delta(problem: Problem) -> float:
    """1.345 × the robust scale (1.4826 × median |r|) of the residuals about the L1 fit: 95 % efficient."""
    r = problem.residuals(solve(problem.like("l1")).theta)[0]
    return max(1.345 * 1.4826 * float(np.median(np.abs(r))), 1e-9)


def _certificate(
    problem: Objective, theta: Array, cost: float, runs: list[tuple[Array, float]], n_starts: int
) -> dict[str, Any]:
    """Do the best two starts agree, does a restart from a 1 % perturbation gain nothing, is it stationary?"""
    free = [j for j in range(problem.k) if theta[j] > -np.inf]
    spread = max(0.0, (runs[1][1] if len(runs) > 1 else np.inf) - cost)
    rng, gain = np.random.default_rng(0), 0.0
    for _ in range(2):
        moved = theta.copy()
        moved[free] *= 1 + 0.01 * rng.choice([-1.0, 1.0], len(free))
        gain = max(gain, cost - problem.minimise(moved, free)[1])
    exact = cost <= problem.tiny
    gradient = 0.0 if exact else _gradient(problem, theta, free)
    agree, stays = spread <= 1e-8 * cost + problem.tiny, gain <= 1e-10 * cost + problem.tiny
    return {
        "ok": bool(agree and stays and gradient <= 1e-5),
        "starts": n_starts,
        "best_two_differ": 0.0 if exact else float(spread / cost) if np.isfinite(spread) else None,
        "restart_gain": 0.0 if exact else float(gain / cost),
        "gradient": gradient,
    }


def _gradient(problem: Objective, theta: Array, free: list[int]) -> float:
    """The largest cosine between the residuals' influence and a column of the Jacobian: 0 at a smooth minimum.

    L1 has no gradient at a vertex; there it is 0 if a linear programme can promise no gain, else 1.
    """
    r, jac = problem.residuals(theta)
    if problem.objective == "l1":

        def at_free(values: Array) -> tuple[Array, Array]:
            full = theta.copy()
            full[free] = values
            r, jac = problem.residuals(full)
            return r, jac[:, free]

        return 0.0 if minimise_l1(at_free, theta[free])[2] else 1.0
    psi = r if problem.delta is None else np.clip(r, -problem.delta, problem.delta)
    norm = np.linalg.norm(psi) * np.linalg.norm(jac[:, free], axis=0)
    return float(np.max(np.abs(psi @ jac[:, free]) / np.where(norm > 0, norm, 1.0), initial=0.0))


def starts(form: Form, points: Points, weight: Array) -> list[Array]:
    """Scale-free starts: floors as fractions of min(y), shifts within the data, the rest by least squares."""
    if form.name == "chinchilla":
        return _chinchilla_starts(points)
    low, first, last = points.y.min(), points.x.min(), points.x.max()
    floors = (0.0, 0.3) if form.name == "power" else (1e-3, 0.1, 0.3, 0.6, 0.8, 0.9, 0.95, 0.99)
    shifts = (first * 0.01, first, np.sqrt(first * last) / 3) if form.name == "shifted" else (0.0,)
    found = []
    for floor, shift in itertools.product(floors, shifts):
        a, slope = ols(np.log(points.x + shift), np.log(points.y - floor * low), weight)
        at = {"E": np.log(floor * low) if floor else 0.0, "A": a, "alpha": -slope, "B": np.log(shift) if shift else 0.0}
        found.append(np.array([at[p] for p in form.params]))
    return found


def _chinchilla_starts(points: Points) -> list[Array]:
    """5 × 5 exponents × 3 floors with A and B by non-negative least squares; the best of them by relative residuals."""
    assert points.x2 is not None
    low, x0, z0 = points.y.min(), points.x.min(), points.x2.min()
    exponents = (0.05, 0.2, 0.4, 0.8, 1.5)
    found = []
    for alpha, beta, floor in itertools.product(exponents, exponents, (0.2, 0.6, 0.95)):
        columns = np.stack([(points.x / x0) ** -alpha, (points.x2 / z0) ** -beta], axis=1) / points.y[:, None]
        (a, b), norm = nnls(columns, 1 - floor * low / points.y)
        log_a = np.log(max(a, 1e-6 * low)) + alpha * np.log(x0)
        log_b = np.log(max(b, 1e-6 * low)) + beta * np.log(z0)
        found.append((norm, np.array([np.log(floor * low), log_a, alpha, log_b, beta])))
    return [theta for _, theta in sorted(found, key=lambda s: s[0])[:12]]
