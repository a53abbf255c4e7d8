"""Choose among forms: how well each predicts the largest models from the smaller ones, else AICc.

In-sample criteria reward curvature anywhere; only held-out large models say what an extrapolation is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clip_linear_eval.fit_diagnose import diagnose
from clip_linear_eval.fit_optimize import Problem
from clip_linear_eval.fit_screen import FitRefused
from clip_linear_eval.fit_solve import solve
from clip_linear_eval.laws import FORMS, Form, Points, quiet

_CHANCE = 0.85  # errors (fractions) above this are near chance, where a shift bends the law


def split(points: Points, largest: int) -> tuple[Points, Points]:
    """The points below the ``largest`` distinct sizes, and those at them."""
    sizes = np.unique(points.x)
    out = points.x >= sizes[-min(largest, len(sizes))]
    return points.take(~out), points.take(out)


def check_split(points: Points, form: Form, largest: int) -> None:
    """Raise FitRefused if too few sizes would remain to fit."""
    left = len(np.unique(points.x)) - largest
    if left < form.k:
        raise FitRefused(
            "insufficient_points",
            f"holding out {largest} of {len(np.unique(points.x))} sizes leaves {left} for {form.k} parameters",
        )


def candidates(points: Points, fraction: bool) -> list[Form]:
    """The forms that these points could support, the simplest first."""
    sizes = len(np.unique(points.x))
    found = [FORMS["power"]]
    if sizes >= 6 and points.decades >= 1.5:
        found.append(FORMS["saturating"])
    if sizes >= 8 and points.decades >= 1.5 and fraction and points.y.max() >= _CHANCE:
        found.append(FORMS["shifted"])
    return found


@quiet
def choose_form(groups: Sequence[Points], objective: str, fraction: bool = False) -> tuple[str, dict[str, Any]]:
    """One form for all groups, and how it was chosen.

    A richer form must predict the held-out sizes better than the simpler one by more than the noise; if the two predict
    alike, AICc decides. With n ≤ 2k + 2 points nothing can be selected and the simplest form stays.
    """
    shared = [f for f in candidates(groups[0], fraction) if all(f in candidates(g, fraction) for g in groups)]
    scores = {form.name: _score(form, groups, objective) for form in shared}
    chosen, why = shared[0], "the only form that these points can support"
    for form in shared[1:]:
        if any(g.n <= 2 * form.k + 2 for g in groups):
            why = f"cannot select: n <= 2k + 2 for {form.name}"
            break
        simple, rich = scores[chosen.name], scores[form.name]
        gain = None if None in (simple["hold_out"], rich["hold_out"]) else simple["hold_out"] - rich["hold_out"]
        if gain is not None and abs(gain) > rich["sigma"]:
            better, why = gain > 0, "hold-out of the largest sizes"
        else:
            better, why = rich["aicc"] < simple["aicc"], "AICc (the forms predict the largest sizes alike)"
        chosen = form if better else chosen
    return chosen.name, {"chosen": chosen.name, "decided_by": why, "forms": scores}


def _score(form: Form, groups: Sequence[Points], objective: str) -> dict[str, Any]:
    """Summed AICc and BIC, and root mean squares of ln y: residuals, leave-one-out, the largest sizes."""
    total: dict[str, Any] = {"k": form.k, "aicc": 0.0, "bic": 0.0}
    noise, loo, held = [], [], []
    for points in groups:
        problem = Problem(form, points, "gaussian" if objective not in ("gaussian", "linear") else objective)
        found = diagnose(problem, solve(problem))
        for name, value in (("aicc", found.aicc), ("bic", found.bic)):
            total[name] = None if value is None or total[name] is None else total[name] + value
        noise.append(found.sigma or 0.0)
        loo.append(found.loo)
        held += _rolled_out(form, points, problem.objective)
    total["sigma"] = float(np.sqrt(np.mean(np.square(noise))))
    total["loo"] = None if None in loo else float(np.sqrt(np.mean(np.square([v for v in loo if v is not None]))))
    total["hold_out"] = float(np.sqrt(np.mean(np.square(held)))) if held else None
    return total


def _rolled_out(form: Form, points: Points, objective: str) -> list[float]:
    """ln(measured / predicted) of the largest sizes, predicted from all smaller ones, leaving out 1, 2, … of them."""
    sizes, errors = len(np.unique(points.x)), []
    for largest in range(1, max(1, sizes // 4) + 1):
        if sizes - largest < form.k + 1:
            break
        train, test = split(points, largest)
        theta = solve(Problem(form, train, objective)).theta
        errors += list(np.log(test.y) - form.log_y_jac(theta, test.x, test.x2)[0])
    return errors
