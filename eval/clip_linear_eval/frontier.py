"""Which runs a law is fitted to: the Pareto frontier over compute, or the rules of two published studies.

Frontiers are order statistics: they lie below the law of the best models by about the noise. Intervals must therefore
resample runs and select again (``fit_bootstrap``), not resample the selected points.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from clip_linear.errors import unknown
from clip_linear_eval.laws import Points

RULES = ("none", "pareto", "cherti", "nezhurina")
_CHERTI_BINS = 5
_BIN_GFLOPS = 1500.0  # Nezhurina et al.: one bin per doubling of compute above this
_LATE_GFLOPS, _CHANCE = 1e11, 0.7  # … and rows above this compute with an error this high are left out


def rule(name: str, x_name: str = "") -> Callable[[Points], Points] | None:
    """The selection of that name, None for "none". Raises UserError for an unknown one.

    ``x_name`` tells ``nezhurina``, whose thresholds are in GFLOPs, that a column in GMACs must be doubled.
    """
    if name not in RULES:
        raise unknown("frontier", name, RULES, "choose one of them")
    if name == "none":
        return None
    rules: dict[str, Callable[[Points], Points]] = {"pareto": pareto, "cherti": cherti}
    return rules.get(name, partial(nezhurina, gflops_per_x=2.0 if x_name.startswith("gmacs") else 1.0))


def pareto(points: Points) -> Points:
    """The points that no point of at most the same compute beats or equals: y strictly falls along them."""
    return points.take(_improving(points, np.lexsort([points.y, points.x])))


def _improving(points: Points, order: NDArray) -> NDArray[np.intp]:
    kept, best = [], np.inf
    for i in order:
        if points.y[i] < best:
            kept.append(i)
            best = points.y[i]
    return np.array(kept, dtype=np.intp)


def cherti(points: Points) -> Points:
    """Cherti et al. 2023 (arXiv 2212.07143): 5 equal bins of log10 C; x is the bin's centre, y its lowest error.

    The centres are not points that were run; ``pareto`` uses real ones.
    """
    log_x = np.log10(points.x)
    edges = np.linspace(log_x.min(), log_x.max(), _CHERTI_BINS + 1)
    cell = np.clip(np.searchsorted(edges, log_x, side="right") - 1, 0, _CHERTI_BINS - 1)
    lowest = _lowest_of_each(points, cell)
    centres = 10 ** ((edges[:-1] + edges[1:]) / 2)[cell[lowest]]
    chosen = points.take(lowest)
    return Points(x=centres, y=chosen.y, x2=chosen.x2, sigma=chosen.sigma, row=chosen.row)


def nezhurina(points: Points, gflops_per_x: float = 1.0) -> Points:
    """Nezhurina et al. 2025 (arXiv 2506.04598): the best point of each of int(log2(max C / 1500 GFLOPs)) − 1 geometric
    bins, of these the strictly improving ones, and the largest run if it improves on them."""
    gflops = points.x * gflops_per_x
    points = points.take(~((gflops > _LATE_GFLOPS) & (points.y >= _CHANCE)))
    if points.n == 0:
        return points
    n_edges = max(2, int(np.log2(max(points.x.max() * gflops_per_x / _BIN_GFLOPS, 4.0))))
    edges = np.geomspace(points.x.min(), points.x.max(), n_edges)
    cell = np.searchsorted(edges, points.x, side="right") - 1
    last = int(np.argmax(points.x))
    inside = np.flatnonzero(cell < n_edges - 1)
    best = inside[_lowest_of_each(points.take(inside), cell[inside])] if len(inside) else inside
    order = [*best, *([last] if last not in best else [])]
    return points.take(_improving(points, np.array(order, dtype=np.intp)))


def _lowest_of_each(points: Points, cell: NDArray) -> NDArray[np.intp]:
    """The index of the lowest y in every cell that holds points, in the order of the cells."""
    return np.array([np.flatnonzero(cell == c)[np.argmin(points.y[cell == c])] for c in np.unique(cell)], dtype=np.intp)
