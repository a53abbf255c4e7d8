"""Objectives and their minimisation over any subset of the parameters.

The solver is scipy's ``least_squares`` in log parameters with the analytic Jacobian, for L1 successive linear
programmes. L-BFGS on the same objectives stops early and reports success; Besiroglu et al. 2024 (arXiv
2404.10102) describe a published case.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import least_squares, leastsq

from clip_linear.errors import unknown
from clip_linear_eval.fit_l1 import minimise_l1
from clip_linear_eval.laws import Array, Form, Points

# name -> what is minimised over residuals r of ln y (of y itself for "linear")
OBJECTIVES = {
    "gaussian": "sum of r^2/2 of ln y",
    "huber": "Huber on ln y, delta = 1.345 x the robust scale of the residuals (1.4826 MAD about the L1 fit)",
    "chinchilla": "Huber on ln y, delta = 0.001",
    "l1": "sum of |r| of ln y",
    "linear": "sum of r^2/2 of y itself, unweighted",
}
_TOLERANCE = 1e-15
_ROUNDING = 1e-14  # size of a residual that is nothing but rounding errors


class Objective:
    """Something with residuals to minimise. Subclasses give ``residuals``, ``k`` and the ``zeroable`` terms."""

    k: int
    n: int
    zeroable: dict[int, float]  # index of each term that may vanish -> where in θ a vanished one is tried again

    def __init__(self, objective: str, delta: float | None = None) -> None:
        if objective not in OBJECTIVES:
            raise unknown("objective", objective, OBJECTIVES, "choose one of them")
        self.objective = objective
        self.delta = 1e-3 if objective == "chinchilla" else delta

    def residuals(self, theta: Array) -> tuple[Array, Array]:
        """Residuals measured − law, shape [n], and their Jacobian by θ, shape [n, k]."""
        raise NotImplementedError

    def cost(self, theta: Array) -> float:
        """The sum of ρ(r): r²/2; Huber's r²/2 inside δ and δ(|r| − δ/2) outside; |r| for L1."""
        r = np.abs(self.residuals(theta)[0])
        if self.objective == "l1":
            return float(r.sum())
        if self.delta is not None:
            return float(np.where(r <= self.delta, r**2 / 2, self.delta * (r - self.delta / 2)).sum())
        return float(r @ r / 2)

    @cached_property
    def tiny(self) -> float:
        """The cost of rounding errors alone: two costs that differ by less are equal."""
        return self.n * (_ROUNDING if self.objective == "l1" else _ROUNDING * (self.delta or _ROUNDING))

    def minimise(self, theta: Array, free: Iterable[int], rough: bool = False) -> tuple[Array, float]:
        """The minimum near θ over the parameters in ``free``, the others held; returns θ and the cost.

        ``rough`` stops a robust search early, with its cost known to about 1e-8: enough to rank starts, trace
        a profile and resample.
        """
        at = list(free)
        full = np.array(theta, dtype=float)
        if not at:
            return full, self.cost(full)
        start = full[at]
        last: dict[str, Any] = {}

        def at_free(values: Array) -> tuple[Array, Array]:
            if "at" not in last or (values != last["at"]).any():  # solvers ask for r and for J at the same point
                full[at] = values
                r, jac = self.residuals(full)
                last.update(at=values.copy(), r=_bounded(r), jac=_bounded(jac[:, at]))
            return last["r"], last["jac"]

        with np.errstate(all="ignore"):  # a wild trial step may overflow; it is then refused
            if self.objective == "l1":
                full[at] = minimise_l1(at_free, start)[0]
            elif self.delta is None and len(at) <= self.n:
                full[at] = _marquardt(at_free, start)
            else:
                full[at] = least_squares(
                    lambda v: at_free(v)[0],
                    start,
                    jac=lambda v: at_free(v)[1],
                    loss="linear" if self.delta is None else "huber",
                    f_scale=self.delta or 1.0,
                    x_scale="jac",
                    ftol=1e-9 if rough else _TOLERANCE,
                    xtol=_TOLERANCE,
                    gtol=_TOLERANCE,
                    max_nfev=80 if rough else 400,
                ).x
        return full, self.cost(full)

    def settle(
        self, theta: Array, free: Iterable[int], thorough: bool = False, rough: bool = False
    ) -> tuple[Array, float]:
        """As ``minimise``, and the smaller laws with a coefficient at zero (−inf in θ) are weighed against it.

        They are tried where the coefficient has become small, or always if ``thorough``.
        """
        at = list(free)
        start = np.array(theta, dtype=float)
        for j in at:
            if start[j] == -np.inf:
                start[j] = self.zeroable[j]
        best, cost = self.minimise(start, at, rough)
        small = [j for j in self.zeroable if j in at and (thorough or not best[j] > self.zeroable[j])]
        for m in range(1, len(small) + 1):
            for zeros in itertools.combinations(small, m):
                held = best.copy()
                held[list(zeros)] = -np.inf
                smaller, at_zero = self.minimise(held, [j for j in at if j not in zeros], rough)
                if not at_zero > cost * (1 + 1e-10) + self.tiny:
                    best, cost = smaller, min(cost, at_zero)
        return best, cost


def _marquardt(problem: Callable[[Array], tuple[Array, Array]], start: Array) -> Array:
    """Levenberg–Marquardt by MINPACK: what ``least_squares(method="lm")`` runs, without its wrapping, which costs more
    than the fit itself when thousands of small fits make up profiles and resamples."""
    found = leastsq(
        lambda v: problem(v)[0],
        start,
        Dfun=lambda v: problem(v)[1],
        full_output=True,
        ftol=_TOLERANCE,
        xtol=_TOLERANCE,
        gtol=0.0,
        maxfev=400,
    )
    return np.asarray(found[0], dtype=float)


def _bounded(values: Array) -> Array:
    if np.isfinite(values).all():
        return values
    return np.nan_to_num(values, nan=1e150, posinf=1e150, neginf=-1e150)


class Problem(Objective):
    """One form on one set of points."""

    def __init__(self, form: Form, points: Points, objective: str = "gaussian", delta: float | None = None) -> None:
        super().__init__(objective, delta)
        self.form, self.points = form, points
        self.n, self.k = points.n, form.k
        small = {"E": 1e-2 * points.y.min(), "B": 1e-2 * points.x.min()}
        self.zeroable = {form.index(p): float(np.log(small[p])) for p in form.zeroable}
        self.log_y = np.log(points.y)
        self.weight = np.ones(points.n) if points.sigma is None else 1 / points.sigma

    def residuals(self, theta: Array) -> tuple[Array, Array]:
        log_f, jac = self.form.log_y_jac(theta, self.points.x, self.points.x2)
        if self.objective == "linear":
            f = np.exp(log_f)
            return self.points.y - f, -f[:, None] * jac
        return self.weight * (self.log_y - log_f), -self.weight[:, None] * jac

    def like(self, objective: str, delta: float | None = None) -> Problem:
        """The same points and form under another objective."""
        return Problem(self.form, self.points, objective, delta)


def ols(u: Array, v: Array, weight: Array | None = None) -> tuple[float, float]:
    """Intercept and slope of v on u by (weighted) least squares, computed about the centre of u."""
    w = np.ones_like(u) if weight is None else weight**2
    mean_u, mean_v = np.average(u, weights=w), np.average(v, weights=w)
    spread = w @ (u - mean_u) ** 2
    slope = float(w @ ((u - mean_u) * (v - mean_v)) / spread) if spread > 0 else 0.0
    return float(mean_v - slope * mean_u), slope
