"""Bootstrap of a law over runs, with a stored seed; a frontier is selected again in every draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from clip_linear_eval.fit_intervals import LEVEL
from clip_linear_eval.fit_optimize import Problem
from clip_linear_eval.fit_solve import solve
from clip_linear_eval.laws import Array, Form, Points, quiet


@dataclass(frozen=True)
class Draws:
    """Parameters θ of the resamples, shape [draws − failed, k]."""

    form: Form
    theta: Array
    draws: int
    failed: int
    seed: int
    n_clusters: int

    @quiet
    def interval(self, values: Array) -> tuple[float, float]:
        lo, hi = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(lo), float(hi)

    @quiet
    def natural(self) -> dict[str, Array]:
        """Each parameter's draws in natural units."""
        logged = {p: self.theta[:, j] for j, p in enumerate(self.form.params)}
        return {p: v if p in ("alpha", "beta") else np.exp(v) for p, v in logged.items()}

    @quiet
    def to_json(self) -> dict[str, Any]:
        values = self.natural()
        return {
            "draws": self.draws,
            "failed": self.failed,
            "seed": self.seed,
            "clusters": self.n_clusters,
            "method": "pairs, percentile",
            "ci95": {p: self.interval(v) for p, v in values.items()},
            "se": {p: float(np.std(v, ddof=1)) for p, v in values.items()},
        }


@quiet
def bootstrap(
    points: Points,
    form: Form,
    objective: str,
    theta: Array,
    *,
    draws: int,
    seed: int,
    delta: float | None = None,
    choose: Callable[[Points], Points] | None = None,
    clusters: Array | None = None,
) -> Draws | None:
    """Resample clusters of points (each point by itself if None), select, and fit again from ``theta``.

    Draws that hold too few distinct sizes are counted as failed; None if fewer than half can be fitted.
    """
    rng = np.random.default_rng(seed)
    labels = np.arange(points.n) if clusters is None else np.unique(clusters, return_inverse=True)[1].ravel()
    members = [np.flatnonzero(labels == c) for c in range(labels.max() + 1)]
    found = []
    for _ in range(draws):
        picked = np.concatenate([members[c] for c in rng.integers(0, len(members), len(members))])
        sample = points.take(picked)
        sample = sample if choose is None else choose(sample)
        if not _enough(sample, form):
            continue
        problem = Problem(form, sample, objective, delta)
        found.append(solve(problem, near=theta).theta)
    if 2 * len(found) < draws or len(found) < 2:
        return None
    return Draws(form, np.array(found), draws, draws - len(found), seed, len(members))


def _enough(points: Points, form: Form) -> bool:
    """Whether a resample can determine the law: enough distinct sizes, and for ``chinchilla`` in both directions."""
    if points.x2 is not None and min(len(np.unique(points.x)), len(np.unique(points.x2))) < 3:
        return False
    return len(np.unique(points.x if points.x2 is None else points.x * points.x2)) >= form.k
