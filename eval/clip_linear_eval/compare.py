"""Compare the laws of two variants: equal exponents, constant multiplier, crossover, and the size for the same error.

All of it comes from one joint fit with a common residual scale. A large p never means "the same scaling":
``detectable`` says how large a difference these data would have shown.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.stats import chi2
from scipy.stats import f as f_dist
from scipy.stats import t as t_dist

from clip_linear.errors import UserError
from clip_linear_eval.compare_joint import JointProblem
from clip_linear_eval.compare_sizes import Pair, crossover, size_multiplier
from clip_linear_eval.fit_intervals import LEVEL, Interval, covariance, profile, t_interval
from clip_linear_eval.fit_optimize import Problem
from clip_linear_eval.fit_solve import Solution, solve
from clip_linear_eval.laws import quiet
from clip_linear_eval.laws_fitted import Law, plain

POWER = 0.8  # of the smallest difference that is called detectable


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Variant ``group`` against ``ref``: differences are ref − group, multipliers group / ref. All intervals are 95 %.

    ``equal_exponent``: F, p, lr_p (of the likelihood ratio, anti-conservative in small samples), delta_alpha, ci95, se,
    dof, detectable. ``equal_law``: F, p of one law for both. ``constant_multiplier``: under a common exponent.
    ``crossover``: x, in_range, set {kind, x}; kind "complement" means all x but the given interval.
    ``size_multiplier``: xmin, xmax (at the ends of the common range), their intervals and the curve between.
    """

    group: str
    ref: str
    sigma: float | None
    dof: int
    equal_exponent: dict[str, Any]
    equal_law: dict[str, Any] | None
    constant_multiplier: dict[str, Any] | None
    crossover: dict[str, Any]
    size_multiplier: dict[str, Any]
    p_holm: float | None = None
    paired: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return dict(plain(asdict(self)))


@quiet
def compare_laws(a: Law, b: Law, *, names: tuple[str, str] = ("a", "b")) -> Comparison:
    """Compare law ``b`` with the reference ``a``. Raises UserError if they were not fitted in the same way."""
    same = (a.form, a.objective) == (b.form, b.objective)
    if not same or a.objective not in ("gaussian", "linear") or (a.points.sigma is None) != (b.points.sigma is None):
        raise UserError(
            f"cannot compare a {a.form}/{a.objective} law with a {b.form}/{b.objective} one; fit both with one form "
            "and weights, and objective gaussian or linear"
        )
    joint = JointProblem(a.problem, b.problem)
    best = Solution(joint.join(a.theta, b.theta), a.cost + b.cost, {})
    dof = joint.n - joint.k
    s2 = 2 * best.cost / dof if dof > 0 else None
    pair = Pair(a, b, joint, None if s2 is None else covariance(joint, best, s2), dof)
    return Comparison(
        group=names[1],
        ref=names[0],
        sigma=None if s2 is None else float(np.sqrt(s2)),
        dof=dof,
        equal_exponent=_equal_exponent(pair, best, s2),
        equal_law=_equal_law(joint, best, dof),
        constant_multiplier=_constant_multiplier(joint, best, dof),
        crossover=crossover(pair),
        size_multiplier=size_multiplier(pair),
    )


def _equal_exponent(pair: Pair, best: Solution, s2: float | None) -> dict[str, Any]:
    joint, dof = pair.joint, pair.dof
    delta = float(best.theta[joint.diff])
    if pair.cov is None or s2 is None:
        empty = dict.fromkeys(("F", "p", "lr_p", "ci95", "se", "detectable"))
        return {"delta_alpha": delta, **empty, "dof": dof}
    se = float(np.sqrt(pair.cov[joint.diff, joint.diff]))
    ci95: Interval
    if best.cost <= joint.tiny:  # exact data: whatever differs, differs
        f, ci95 = (0.0 if abs(delta) < 1e-9 else 1e30), (delta, delta)
    elif joint.ref.form.name == "power" and joint.objective == "gaussian":
        f, ci95 = float(np.square(np.divide(delta, se))), t_interval(delta, se, dof)
    else:
        _, cost = joint.settle(_held(joint, best), _all_but(joint))
        f, ci95 = max(2 * (cost - best.cost), 0.0) / s2, profile(joint, best, joint.diff, s2, dof, se)
    return {
        "F": float(f),
        "p": float(f_dist.sf(f, 1, dof)),
        "lr_p": float(chi2.sf(joint.n * np.log1p(f / dof), 1)),
        "delta_alpha": delta,
        "ci95": ci95,
        "se": se,
        "dof": dof,
        "detectable": detectable(se, dof),
    }


def detectable(se: float, dof: int) -> float:
    """About the smallest true difference that a two-sided 5 % t test finds with power 0.8, given its standard error."""
    return float((t_dist.ppf((1 + LEVEL) / 2, dof) + t_dist.ppf(POWER, dof)) * se)


def _held(joint: JointProblem, best: Solution) -> np.ndarray:
    start = best.theta.copy()
    start[joint.diff] = 0.0
    return start


def _all_but(joint: JointProblem) -> list[int]:
    return [j for j in range(joint.k) if j != joint.diff]


def _equal_law(joint: JointProblem, best: Solution, dof: int) -> dict[str, Any] | None:
    """F of one law for both variants against two laws: can they be told apart at all?"""
    if dof < 1 or best.cost <= joint.tiny:
        return None
    first, second = joint.ref, joint.other
    pooled = first.points.with_more(second.points)
    cost = solve(Problem(first.form, pooled, joint.objective, joint.delta)).cost
    f = max(cost - best.cost, 0.0) / first.k / (best.cost / dof)
    return {"F": float(f), "p": float(f_dist.sf(f, first.k, dof)), "dof": [first.k, dof]}


def _constant_multiplier(joint: JointProblem, best: Solution, dof: int) -> dict[str, Any] | None:
    """Under one common exponent: how many times ref's size the group needs everywhere, (A_group / A_ref)^(1/α)."""
    if joint.ref.form.name != "power":
        return None
    theta, cost = joint.minimise(_held(joint, best), _all_but(joint))
    alpha, gap = float(theta[joint.alpha]), float(theta[joint.ref.k] - theta[0])
    if alpha <= 0:
        return None
    answer: dict[str, Any] = {"alpha": alpha, "ratio": float(np.exp(gap / alpha)), "ci95": None}
    if dof > 0:
        cov = covariance(joint, Solution(theta, cost, {}), 2 * cost / (dof + 1), _all_but(joint))
        slope = np.zeros(joint.k)
        slope[[joint.ref.k, 0, joint.alpha]] = 1 / alpha, -1 / alpha, -gap / alpha**2
        lo, hi = t_interval(gap / alpha, float(np.sqrt(max(float(slope @ cov @ slope), 0.0))), dof + 1)
        answer["ci95"] = (float(np.exp(lo)), float(np.exp(hi)))
    return answer


def holm(p_values: list[float | None]) -> list[float | None]:
    """Holm's step-down adjusted p values: valid for any dependence among the comparisons with one reference."""
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    worst = 0.0
    for rank, (p, i) in enumerate(known):
        worst = max(worst, min(1.0, p * (len(known) - rank)))
        adjusted[i] = worst
    return adjusted
