"""Two laws fitted at once, with the difference of their exponents as a parameter."""

from __future__ import annotations

import numpy as np

from clip_linear_eval.fit_optimize import Objective, Problem
from clip_linear_eval.laws import Array


class JointProblem(Objective):
    """Two laws of one form at once: θ = (θ of ref, θ of group) with the group's α replaced by d = α_ref − α_group."""

    def __init__(self, ref: Problem, other: Problem) -> None:
        super().__init__(ref.objective, ref.delta)
        self.ref, self.other = ref, other
        self.n, self.k = ref.n + other.n, ref.k + other.k
        self.alpha, self.diff = ref.form.index("alpha"), ref.k + other.form.index("alpha")
        self.zeroable = ref.zeroable | {ref.k + j: v for j, v in other.zeroable.items()}

    def split(self, theta: Array) -> tuple[Array, Array]:
        first, second = theta[: self.ref.k].copy(), theta[self.ref.k :].copy()
        second[self.diff - self.ref.k] = theta[self.alpha] - theta[self.diff]
        return first, second

    def join(self, first: Array, second: Array) -> Array:
        theta = np.concatenate([first, second])
        theta[self.diff] = first[self.alpha] - second[self.alpha]
        return theta

    def residuals(self, theta: Array) -> tuple[Array, Array]:
        first, second = self.split(theta)
        (r1, j1), (r2, j2) = self.ref.residuals(first), self.other.residuals(second)
        jac = np.zeros((self.n, self.k))
        jac[: self.ref.n, : self.ref.k] = j1
        jac[self.ref.n :, self.ref.k :] = j2
        slope = j2[:, self.diff - self.ref.k]
        jac[self.ref.n :, self.alpha], jac[self.ref.n :, self.diff] = slope, -slope
        return np.concatenate([r1, r2]), jac
