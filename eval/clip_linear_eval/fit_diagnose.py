"""How good a fit is: information criteria, leave-one-out error, lack of fit, and points far off the law."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import f as f_dist
from scipy.stats import norm
from scipy.stats import t as t_dist

from clip_linear_eval.fit_optimize import Problem
from clip_linear_eval.fit_solve import Solution
from clip_linear_eval.laws import Array

_ALPHA = 0.01  # family-wise level of the outlier test (Bonferroni over the points)
_VISIBLE = 1e-6  # a relative deviation below this is no outlier, whatever its studentised size


@dataclass(frozen=True)
class Diagnosis:
    """Numbers about the residuals; None where they mean nothing (no degrees of freedom, a robust objective)."""

    rss: float
    sigma: float | None
    aicc: float | None
    bic: float | None
    loo: float | None
    outliers: tuple[int, ...]  # indices of points
    lack_of_fit: dict[str, float] | None


def diagnose(problem: Problem, solution: Solution) -> Diagnosis:
    """Residual diagnostics of a solution.

    AICc and BIC hold n(1 + ln 2π) and count σ as a parameter. ``loo`` is the root mean square of the leave-one-out
    residuals r/(1 − h), exact for a power law and first-order elsewhere.
    """
    r, jac = problem.residuals(solution.theta)
    n, k = problem.n, problem.k
    rss = float(r @ r)
    dof = n - k
    leverage = _leverage(jac[:, solution.free])
    loo = float(np.sqrt(np.mean((r / (1 - leverage)) ** 2))) if dof > 0 and (leverage < 1 - 1e-9).all() else None
    aicc, bic = _criteria(problem, rss, n, k + 1)
    return Diagnosis(
        rss=rss,
        sigma=float(np.sqrt(rss / dof)) if dof > 0 else None,
        aicc=aicc,
        bic=bic,
        loo=loo,
        outliers=_outliers(problem, r, leverage, dof),
        lack_of_fit=_lack_of_fit(problem, rss),
    )


def _leverage(jac: Array) -> Array:
    norms = np.linalg.norm(jac, axis=0)
    u, s, _ = np.linalg.svd(jac / np.where(norms > 0, norms, 1.0), full_matrices=False)
    return (u[:, s > 1e-12 * s.max()] ** 2).sum(axis=1)


def _criteria(problem: Problem, rss: float, n: int, k: int) -> tuple[float | None, float | None]:
    if problem.objective not in ("gaussian", "linear") or n < k:
        return None, None
    deviance = n * np.log(max(rss, n * 1e-32) / n) + n * (1 + np.log(2 * np.pi))
    if problem.objective == "gaussian":
        deviance -= 2 * np.log(problem.weight).sum()  # weighted residuals: the density of ln y itself
    bic = deviance + k * np.log(n)
    return (float(deviance + 2 * k + 2 * k * (k + 1) / (n - k - 1)) if n > k + 1 else None), float(bic)


def _outliers(problem: Problem, r: Array, leverage: Array, dof: int) -> tuple[int, ...]:
    """Externally studentised residuals against Student's t; for robust objectives residuals against their MAD."""
    n = len(r)
    relative = np.abs(r / problem.weight) if problem.objective != "linear" else np.abs(r) / problem.points.y
    deleted = relative / np.maximum(1 - leverage, 1e-9)
    if dof < 2:
        return ()
    if problem.objective in ("gaussian", "linear"):
        left = np.maximum(1 - leverage, 1e-12)
        others = np.maximum(r @ r - r**2 / left, 0.0) / (dof - 1)  # s² without the point
        ratio = np.abs(r) / np.sqrt(np.maximum(others * left, 1e-300))
        limit = float(t_dist.isf(_ALPHA / 2 / n, dof - 1))
        usable = leverage < 1 - 1e-6
    else:
        ratio = np.abs(r) / max(1.4826 * float(np.median(np.abs(r))), 1e-300)
        limit, usable = float(norm.isf(_ALPHA / 2 / n)) * np.sqrt(n / dof), np.ones(n, dtype=bool)
    return tuple(int(i) for i in np.flatnonzero(usable & (ratio > limit) & (deleted > _VISIBLE)))


def _lack_of_fit(problem: Problem, rss: float) -> dict[str, float] | None:
    """F of the law's misfit against the scatter of replicates (seeds) at one size; a small p: the form is wrong."""
    points = problem.points
    if problem.objective != "gaussian" or points.sigma is not None:
        return None
    pairs = np.stack([points.x] if points.x2 is None else [points.x, points.x2], axis=1)
    _, cell = np.unique(pairs, axis=0, return_inverse=True)
    cell = cell.ravel()
    m = int(cell.max()) + 1
    within = problem.n - m
    between = m - problem.k
    if within < 1 or between < 1:
        return None
    means = np.bincount(cell, problem.log_y) / np.bincount(cell)
    pure = float(((problem.log_y - means[cell]) ** 2).sum())
    if pure <= problem.n * 1e-24:
        return None
    f = max(rss - pure, 0.0) / between / (pure / within)
    return {
        "F": float(f),
        "p": float(f_dist.sf(f, between, within)),
        "sigma_replicates": float(np.sqrt(pure / within)),
        "dof": float(within),
    }
