"""Where two laws cross, and how much larger one variant must be than the other for the same error.

The crossover's 95 % set holds every x at which the difference of the two laws is not significant (Fieller 1954 for two
straight lines in log–log). It may be an interval, the complement of one, or the whole line: the delta method's interval
for −Δ(ln A)/Δα means nothing when Δα is near 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import t as t_dist

from clip_linear_eval.compare_joint import JointProblem
from clip_linear_eval.fit_intervals import LEVEL
from clip_linear_eval.laws import Array, get_form
from clip_linear_eval.laws_fitted import Law

_REACH = 1e3  # laws that are not straight lines are searched for crossings this far beyond the data
_GRID = 4001


@dataclass(frozen=True)
class Pair:
    """Two laws, their joint problem, and the covariance of its parameters (None without degrees of freedom)."""

    ref: Law
    group: Law
    joint: JointProblem
    cov: Array | None
    dof: int

    @property
    def common(self) -> tuple[float, float] | None:
        """The range of x that both variants' data cover."""
        low = max(self.ref.x_range[0], self.group.x_range[0])
        high = min(self.ref.x_range[1], self.group.x_range[1])
        return (low, high) if low <= high else None

    @property
    def t(self) -> float:
        return float(t_dist.ppf((1 + LEVEL) / 2, self.dof))

    def gap(self, x: Array) -> tuple[Array, Array]:
        """ln y_ref(x) − ln y_group(x) and its gradient by the joint θ, shape [n, k]."""
        (f, jf), (g, jg) = (get_form(law.form).log_y_jac(law.theta, x) for law in (self.ref, self.group))
        return f - g, self.chain(jf, -jg)

    def chain(self, by_ref: Array, by_group: Array) -> Array:
        """Derivatives by each law's own θ as derivatives by the joint θ (where α_group = α_ref − d)."""
        jac = np.concatenate([by_ref, by_group], axis=1)
        slope = jac[:, self.joint.diff].copy()
        jac[:, self.joint.alpha] += slope
        jac[:, self.joint.diff] = -slope
        return jac

    def variance(self, gradient: Array) -> Array:
        assert self.cov is not None
        return np.maximum(np.einsum("ni,ij,nj->n", gradient, self.cov, gradient), 0.0)


def crossover(pair: Pair) -> dict[str, Any]:
    """{x, in_range, set}: where the laws cross (None if they do not), whether both variants' data reach there."""
    if pair.ref.form == "chinchilla":
        return {"x": None, "in_range": False, "set": None}
    if pair.ref.form == "power":
        x, found = _straight(pair)
    else:
        x, found = _curved(pair)
    inside = pair.common is not None and x is not None and pair.common[0] <= x <= pair.common[1]
    return {"x": x, "in_range": bool(inside), "set": found}


def _straight(pair: Pair) -> tuple[float | None, dict[str, Any] | None]:
    center = float(np.mean(np.log(np.concatenate([pair.ref.points.x, pair.group.points.x]))))
    gap, gradient = pair.gap(np.exp([center]))
    d0, d1 = float(gap[0]), pair.ref.params["alpha"] - pair.group.params["alpha"]  # gap at z: d0 - d1 (z - center)
    x = _exp(center + d0 / d1) if d1 != 0 else None
    if pair.cov is None:
        return x, None
    slope = np.zeros(pair.joint.k)
    slope[pair.joint.diff] = 1.0
    v00, v01, v11 = (
        float(u @ pair.cov @ w) for u, w in ((gradient[0], gradient[0]), (gradient[0], slope), (slope, slope))
    )
    t2 = pair.t**2
    a, half_b, c = d1**2 - t2 * v11, d0 * d1 - t2 * v01, d0**2 - t2 * v00  # a z^2 - 2 half_b z + c <= 0
    inner = half_b**2 - a * c
    if a == 0 or (a < 0 and inner <= 0):
        return x, {"kind": "empty" if a == 0 and d0 != 0 and v00 == 0 else "whole_line", "x": None}
    root = np.sqrt(max(inner, 0.0))
    ends = sorted(((half_b - root) / a, (half_b + root) / a))
    return x, {"kind": "interval" if a > 0 else "complement", "x": [_exp(center + e) for e in ends]}


def _exp(z: float) -> float | None:
    return float(np.exp(z)) if abs(z) < 700 else None


def _curved(pair: Pair) -> tuple[float | None, dict[str, Any] | None]:
    all_x = np.concatenate([pair.ref.points.x, pair.group.points.x])
    grid = np.geomspace(all_x.min() / _REACH, all_x.max() * _REACH, _GRID)
    gap, gradient = pair.gap(grid)
    turns = np.flatnonzero(np.sign(gap[:-1]) * np.sign(gap[1:]) < 0)
    x = None
    if len(turns):
        i = int(turns[np.argmin(np.abs(np.log(grid[turns]) - np.log(all_x).mean()))])
        root = brentq(lambda z: float(pair.gap(np.exp([z]))[0][0]), np.log(grid[i]), np.log(grid[i + 1]))
        x = float(np.exp(root))
    if pair.cov is None:
        return x, None
    inside = np.abs(gap) <= pair.t * np.sqrt(pair.variance(gradient))
    return x, _set_on_grid(grid, inside)


def _set_on_grid(grid: Array, inside: NDArray[np.bool_]) -> dict[str, Any]:
    """The set as one of the four kinds; where it has several pieces, the hull of the pieces (or of the gaps)."""
    if inside.all() or not inside.any():
        return {"kind": "whole_line" if inside.all() else "empty", "x": None}
    complement = bool(inside[0] and inside[-1])
    at = np.flatnonzero(~inside) if complement else np.flatnonzero(inside)
    ends = [float(grid[at[0]]), float(grid[at[-1]])]
    open_ends = [None if at[0] == 0 else ends[0], None if at[-1] == len(grid) - 1 else ends[1]]
    return {"kind": "complement" if complement else "interval", "x": ends if complement else open_ends}


def size_multiplier(pair: Pair, points: int = 41) -> dict[str, Any]:
    """How many times ref's x the group needs for the error that ref has at x; only where both have data."""
    empty = dict.fromkeys(("xmin", "xmax", "xmin_ci95", "xmax_ci95", "x_range"))
    if pair.common is None or pair.ref.form == "chinchilla":
        return {**empty, "curve": []}
    x = np.geomspace(*pair.common, points) if pair.common[0] < pair.common[1] else np.array([pair.common[0]])
    ratio, lo, hi = multiplier(pair, x)
    curve = [
        {"x": float(a), "ratio": _number(m), "ci95": None if lo is None or hi is None else (_number(b), _number(c))}
        for a, m, b, c in zip(x, ratio, x if lo is None else lo, x if hi is None else hi)
    ]
    return {
        "xmin": curve[0]["ratio"],
        "xmax": curve[-1]["ratio"],
        "xmin_ci95": curve[0]["ci95"],
        "xmax_ci95": curve[-1]["ci95"],
        "x_range": pair.common,
        "curve": curve,
    }


def _number(v: float) -> float | None:
    return float(v) if np.isfinite(v) else None


def multiplier(pair: Pair, x: Array) -> tuple[Array, Array | None, Array | None]:
    """The multiplier at x and its 95 % limits (delta method on its logarithm); NaN where the group never gets there."""
    group, form = pair.group, get_form(pair.group.form)
    log_f, by_ref = get_form(pair.ref.form).log_y_jac(pair.ref.theta, x)
    with np.errstate(all="ignore"):
        above = np.exp(log_f) - group.params.get("E", 0.0)
        log_a = group.theta[form.index("A")]
        needed = np.exp(np.divide(log_a - np.log(above), group.params["alpha"]))  # a flat law never gets there
        if group.form == "shifted":
            needed = needed - group.params["B"]
        needed = np.where((above > 0) & (needed > 0) & np.isfinite(needed), needed, np.nan)
        ratio = needed / x
        if pair.cov is None:
            return ratio, None, None
        known = np.nan_to_num(needed, nan=1.0)
        _, by_group = form.log_y_jac(group.theta, known)
        slope = -group.local_slope(known)  # d ln y_group / d ln x
        gradient = pair.chain(by_ref / slope[:, None], -by_group / slope[:, None])
        half = pair.t * np.sqrt(pair.variance(gradient))
        return ratio, ratio * np.exp(-half), ratio * np.exp(half)
