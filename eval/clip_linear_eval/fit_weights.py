"""Weights of a fit from the scatter of replicates."""

from __future__ import annotations

import numpy as np

from clip_linear_eval.fit_screen import FitRefused
from clip_linear_eval.laws import Array

SEEDS = "seeds"  # as --sigma: weights from replicates


def replicate_sigma(x: Array, y: Array) -> Array:
    """The sd of ln y at each x from its replicates (seeds), drawn towards the pooled one as if that had 4 degrees of
    freedom: the sd of two or three seeds by itself would be a wild weight. Raises FitRefused without replicates."""
    usable = np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)
    sigma = np.ones_like(x)
    groups = [np.flatnonzero(usable & (x == v)) for v in np.unique(x[usable])]
    squares = [float(((np.log(y[g]) - np.log(y[g]).mean()) ** 2).sum()) for g in groups]
    dof = [len(g) - 1 for g in groups]
    if sum(dof) < 2 or min(dof) < 1 or sum(squares) == 0:
        raise FitRefused("missing_column", "--sigma seeds needs two or more different rows at every x", [SEEDS])
    pooled = sum(squares) / sum(dof)
    for g, square, free in zip(groups, squares, dof):
        sigma[g] = np.sqrt((4 * pooled + square) / (4 + free))
    return sigma
