"""Least absolute deviations by successive linear programmes: exact vertices and a proof of first-order optimality."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.optimize import linprog

from clip_linear_eval.laws import Array

_GAIN = 1e-13  # relative gain of the linear programme below which the point is stationary
_STEPS = 200


def minimise_l1(residuals: Callable[[Array], tuple[Array, Array]], theta: Array) -> tuple[Array, float, bool]:
    """Minimise ``Σ |r(θ)|``; ``residuals`` returns r [n] and its Jacobian [n, k].

    Each step solves ``min Σ |r + J d|`` within a trust region (scaled by the columns of J) with HiGHS. Returns θ, the
    cost and whether the last linear programme could promise no further gain, which certifies a first-order optimum.
    """
    r, jac = residuals(theta)
    cost, radius = float(np.abs(r).sum()), 1.0
    for _ in range(_STEPS):
        scale = np.sqrt((jac**2).mean(axis=0))
        scale[scale == 0] = 1.0
        step = _step(r, jac / scale, radius)
        if step is None:
            return theta, cost, False
        promised = cost - float(np.abs(r + jac / scale @ step).sum())
        if promised <= _GAIN * cost + 1e-300:
            return theta, cost, True
        trial = theta + step / scale
        r_new, jac_new = residuals(trial)
        new = float(np.abs(r_new).sum())
        gain = (cost - new) / promised
        if np.isfinite(new) and gain > 1e-4:
            theta, r, jac, cost = trial, r_new, jac_new, new
        radius = radius * 2 if gain > 0.75 else radius * 0.25 if not gain > 0.25 else radius
        if radius < 1e-15:  # the model promises more than double precision can show
            return theta, cost, promised <= 1e-9 * cost
    return theta, cost, False


def _step(r: Array, jac: Array, radius: float) -> Array | None:
    """argmin over |d| <= radius of Σ |r + J d|, from the dual: max r·z − radius Σ|Jᵀz| over −1 <= z <= 1.

    The dual has k equations instead of 2n inequalities; d are their multipliers.
    """
    n, k = jac.shape
    size = max(float(np.abs(r).max()), 1e-300)  # HiGHS has absolute tolerances: solve in units of the largest residual
    answer = linprog(
        np.r_[-r / size, np.full(2 * k, radius / size)],
        A_eq=np.hstack([jac.T, -np.eye(k), np.eye(k)]),
        b_eq=np.zeros(k),
        bounds=np.r_[np.tile([-1.0, 1.0], (n, 1)), np.tile([0.0, np.inf], (2 * k, 1))],
        method="highs",
    )
    return None if answer.x is None else np.asarray(answer.eqlin.marginals) * size
