"""Two variants compared run by run: the same model size, samples and seed in both.

Runs that share data order and initialisation share part of their noise; it cancels in ln y_ref − ln y_group, whose
slope over ln x is α_group − α_ref. The slope takes the size of the reference's run as x.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.stats import t as t_dist

from clip_linear_eval.fit_intervals import t_interval
from clip_linear_eval.laws_fitted import Law

LEAST = 4  # pairs: two degrees of freedom


def paired(ref: Law, group: Law, keys: Mapping[int, str]) -> dict[str, Any] | None:
    """Δα = α_ref − α_group and the mean ratio from matched runs; ``keys`` names the match of each row number.

    None with fewer than four pairs of two or more sizes, or where a key is not unique within a variant.
    """
    if ref.frontier != "none" or group.frontier != "none":
        return None
    first, second = (_by_key(law, keys) for law in (ref, group))
    if first is None or second is None:
        return None
    shared = sorted(first.keys() & second.keys())
    if len(shared) < LEAST or len({first[k][0] for k in shared}) < 2:
        return None
    u = np.log([first[k][0] for k in shared])
    d = np.log([first[k][1] for k in shared]) - np.log([second[k][1] for k in shared])
    spread, dof = float(((u - u.mean()) ** 2).sum()), len(shared) - 2
    slope = float(((u - u.mean()) * d).sum() / spread)
    residual = d - d.mean() - slope * (u - u.mean())
    s = float(np.sqrt(residual @ residual / dof))
    lo, hi = t_interval(-slope, s / np.sqrt(spread), dof)
    ratio = t_interval(-float(d.mean()), s / np.sqrt(len(shared)), dof)
    return {
        "n": len(shared),
        "delta_alpha": -slope,
        "ci95": (lo, hi),
        "p": float(2 * t_dist.sf(abs(slope) * np.sqrt(spread) / s, dof)) if s > 0 else None,
        "ratio": float(np.exp(-d.mean())),  # y_group / y_ref at the middle size
        "ratio_ci95": (float(np.exp(ratio[0])), float(np.exp(ratio[1]))),
        "sigma": s,
    }


def _by_key(law: Law, keys: Mapping[int, str]) -> dict[str, tuple[float, float]] | None:
    if law.points.row is None:
        return None
    found: dict[str, tuple[float, float]] = {}
    for row, x, y in zip(law.points.row, law.points.x, law.points.y):
        key = keys.get(int(row))
        if key is None or key in found:
            return None
        found[key] = (float(x), float(y))
    return found
