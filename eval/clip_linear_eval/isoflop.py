"""IsoFLOP analysis (Hoffmann et al. 2022, approach 2): the best size at each compute budget, and how it grows.

A parabola in ln N is fitted to y at each budget; its vertex is the best N, and N_opt = coef C^a over the budgets.
Vertices are biased when the two exponents of the loss differ (+2.9 % on a noise-free surface with a window of 8x either
way), the exponent a is not; a joint ``chinchilla`` fit has no such bias.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import t as t_dist

from clip_linear_eval.fit_intervals import LEVEL
from clip_linear_eval.fit_points import fit_points
from clip_linear_eval.fit_screen import Caution, Dropped, FitRefused, Screened
from clip_linear_eval.laws import Array, Points, get_form, quiet
from clip_linear_eval.laws_fitted import Law

SAME_BUDGET = 0.05  # relative gap between neighbours below which rows belong to one budget
BIAS = "vertices are biased when the exponents of N and D differ (about 3 % for a window of 8x); a is not"


@dataclass(frozen=True)
class Vertex:
    """The minimum of one budget's parabola; ``rejected`` says why it is not used."""

    budget: float
    n: int
    n_opt: float | None
    ci95: tuple[float | None, float | None] | None
    y_opt: float | None
    rejected: str | None


@dataclass(frozen=True)
class Isoflop:
    """N_opt = coef · C^a over the used vertices, with the power law's intervals."""

    law: Law  # of the vertices: alpha = −a, A = coef
    points: tuple[Vertex, ...]
    warnings: tuple[Caution, ...]
    dropped: tuple[Dropped, ...]
    n: int
    n_rows: int

    @property
    def a(self) -> float:
        return -self.law.params["alpha"]

    def predict(self, budget: ArrayLike) -> Array:
        """The best size at a budget."""
        return self.law.predict(budget)

    def to_json(self) -> dict[str, Any]:
        """The group's entry in fit.json."""
        whole, ends = self.law.to_json(), self.law.ci95
        used = [p for p in self.points if p.rejected is None]
        return whole | {
            "form": "isoflop",
            "n": self.n,
            "n_rows": self.n_rows,
            "params": {"a": self.a, "coef": self.law.params["A"]},
            "ci95": None if ends is None else {"a": _flip(ends["alpha"]), "coef": ends["A"]},
            "se": {"a": self.law.se["alpha"], "coef": self.law.se["A"]},
            "identified": {"a": self.law.identified["alpha"], "coef": self.law.identified["A"]},
            "isoflop": {
                "a": self.a,
                "coef": self.law.params["A"],
                "n_used": len(used),
                "points": [asdict(p) for p in used],
                "rejected": [asdict(p) for p in self.points if p.rejected is not None],
                "bias": BIAS,
            },
        }


def _flip(ends: tuple[float | None, float | None]) -> tuple[float | None, float | None]:
    lo, hi = ends
    return (None if hi is None else -hi), (None if lo is None else -lo)


@quiet
def fit_isoflop(seen: Screened) -> Isoflop:
    """Vertices per budget (``points.x2``) and their power law. Raises FitRefused with fewer than two usable budgets."""
    points = seen.points
    assert points.x2 is not None
    order = np.argsort(points.x2, kind="stable")
    cuts = np.flatnonzero(np.diff(np.log(points.x2[order])) > SAME_BUDGET) + 1
    vertices = tuple(_vertex(points.take(part)) for part in np.split(order, cuts))
    used = [(v.budget, v.n_opt) for v in vertices if v.rejected is None and v.n_opt is not None]
    if len(vertices) < 2:
        raise FitRefused("single_x", f"one budget ({vertices[0].budget:.4g}); an isoFLOP law needs several")
    if len(used) < 2:
        why = "; ".join(f"{v.budget:.3g}: {v.rejected}" for v in vertices if v.rejected)
        raise FitRefused("insufficient_points", f"{len(used)} budgets with a minimum inside their sizes ({why})")
    budgets, best = np.array(used, dtype=float).T
    law = fit_points(Points.of(budgets, best), get_form("power"))
    said = [c for c in seen.cautions if c.code not in ("duplicate_x", "short_range", "increasing_y")]
    said += [c for c in law.warnings if c.code in ("zero_dof", "outlier")]
    if np.log10(budgets.max() / budgets.min()) < 2 - 1e-9:
        said.append(Caution("short_range", f"the budgets span {np.log10(budgets.max() / budgets.min()):.2f} decades"))
    return Isoflop(replace(law, warnings=()), vertices, tuple(said), seen.dropped, points.n, seen.n_rows)


def _vertex(points: Points) -> Vertex:
    assert points.x2 is not None
    budget = float(np.exp(np.log(points.x2).mean()))
    u = np.log(points.x)
    center = u.mean()
    if len(np.unique(points.x)) < 3:
        return Vertex(budget, points.n, None, None, None, "fewer than 3 sizes")
    design = np.stack([np.ones_like(u), u - center, (u - center) ** 2], axis=1)
    c, _, _, _ = np.linalg.lstsq(design, points.y, rcond=None)
    lowest = points.x[np.argmin(points.y)]
    best = center - c[1] / (2 * c[2]) if c[2] != 0 else np.inf
    if c[2] <= 0 or not u.min() < best < u.max() or lowest in (points.x.min(), points.x.max()):
        return Vertex(budget, points.n, None, None, None, "the minimum lies at an edge")
    return Vertex(
        budget,
        points.n,
        float(np.exp(best)),
        _fieller(design, points.y, c, center),
        float(c[0] - c[1] ** 2 / (4 * c[2])),
        None,
    )


def _fieller(design: Array, y: Array, c: Array, center: float) -> tuple[float | None, float | None] | None:
    """95 % interval of the vertex −c1 / 2c2; an end is None where the curve is too flat to give one."""
    dof = len(y) - 3
    if dof < 1:
        return None
    r = y - design @ c
    v = float(r @ r) / dof * np.linalg.inv(design.T @ design)
    t2 = float(t_dist.ppf((1 + LEVEL) / 2, dof)) ** 2
    # all z with (c1 + 2 z c2)^2 <= t^2 (V11 + 4 z V12 + 4 z^2 V22)
    qa, qb, qc = 4 * (c[2] ** 2 - t2 * v[2, 2]), 2 * (c[1] * c[2] - t2 * v[1, 2]), c[1] ** 2 - t2 * v[1, 1]
    if qa <= 0:
        return None, None
    root = np.sqrt(max(qb**2 - qa * qc, 0.0))
    return float(np.exp(center + (-qb - root) / qa)), float(np.exp(center + (-qb + root) / qa))
