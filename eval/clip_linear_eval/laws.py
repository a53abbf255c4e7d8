"""The forms of scaling laws, as log-sum-exp of terms in log parameters, with analytic Jacobians.

Every form is ``ln y = logsumexp(terms)``: ``ln E`` (the floor), ``ln A - α ln(x + B)`` (the power term; the shift B
only in ``shifted``) and ``ln B - β ln x2`` (the second factor, only in ``chinchilla``). α > 0: y falls as x grows.
A coefficient of exactly zero is ``-inf`` in the parameter vector: its term vanishes and its Jacobian column is zero.

Sources: Hoffmann et al. 2022 (arXiv 2203.15556) for ``chinchilla``, Nezhurina et al. 2025 (arXiv 2506.04598) for
``shifted``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clip_linear.errors import unknown

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Points:
    """The points of one law: x, y > 0 of shape [n]; x2 (chinchilla), sigma (sd of ln y) and row numbers where known."""

    x: Array
    y: Array
    x2: Array | None = None
    sigma: Array | None = None
    row: NDArray[np.int64] | None = None

    @staticmethod
    def of(
        x: ArrayLike,
        y: ArrayLike,
        x2: ArrayLike | None = None,
        sigma: ArrayLike | None = None,
        row: ArrayLike | None = None,
    ) -> Points:
        """Points from anything array-like, sorted by x (then x2, y), so that the order of rows never matters."""
        plain = [None if c is None else np.asarray(c, dtype=float).ravel() for c in (x, y, x2, sigma)]
        assert plain[0] is not None and plain[1] is not None
        order = np.lexsort([c for c in (plain[1], plain[2], plain[0]) if c is not None])
        whole = Points(
            x=plain[0], y=plain[1], x2=plain[2], sigma=plain[3], row=None if row is None else np.asarray(row)
        )
        return whole.take(order)

    def take(self, index: NDArray) -> Points:
        """The points at an index or mask."""
        whole: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        picked: dict[str, Any] = {name: None if c is None else c[index] for name, c in whole.items()}
        return Points(**picked)

    def with_more(self, more: Points) -> Points:
        """These points and ``more``, which has the same columns."""
        pairs = {f.name: (getattr(self, f.name), getattr(more, f.name)) for f in fields(self)}
        both: dict[str, Any] = {
            k: None if a is None or b is None else np.concatenate([a, b]) for k, (a, b) in pairs.items()
        }
        return Points.of(**both)

    @property
    def n(self) -> int:
        return len(self.x)

    @property
    def decades(self) -> float:
        return float(np.log10(self.x.max() / self.x.min()))


@dataclass(frozen=True)
class Form:
    """One form: its parameters in the order of the vector θ; all but the exponents enter θ as logarithms."""

    name: str
    equation: str
    params: tuple[str, ...]
    zeroable: tuple[str, ...] = ()  # coefficients whose bound 0 is a smaller law of its own

    @property
    def k(self) -> int:
        return len(self.params)

    def index(self, param: str) -> int:
        return self.params.index(param)

    def natural(self, theta: Array) -> dict[str, float]:
        """θ as named parameters."""
        return {p: float(t if p in EXPONENTS else np.exp(t)) for p, t in zip(self.params, theta)}

    def log_y_jac(self, theta: Array, x: Array, x2: Array | None = None) -> tuple[Array, Array]:
        """ln y at x (and x2), shape [n], and its derivatives by θ, shape [n, k].

        Each derivative is the term's share of y times the derivative of the term's logarithm.
        """
        at = {p: j for j, p in enumerate(self.params)}
        shift = float(np.exp(theta[at["B"]])) if self.name == "shifted" else 0.0
        alpha, lx = theta[at["alpha"]], np.log(x + shift)
        power = theta[at["A"]] - alpha * lx
        total, second, floor = power, None, theta[at["E"]] if "E" in at else -np.inf
        if self.name == "chinchilla":
            assert x2 is not None
            lx2 = np.log(x2)
            second = theta[at["B"]] - theta[at["beta"]] * lx2
            total = np.logaddexp(total, second)
        if floor > -np.inf:
            total = np.logaddexp(total, floor)
        jac = np.zeros((len(x), self.k))
        share = np.exp(power - total)
        jac[:, at["A"]], jac[:, at["alpha"]] = share, -share * lx
        if shift:
            jac[:, at["B"]] = -share * alpha * shift / (x + shift)
        if second is not None:
            share = np.exp(second - total)
            jac[:, at["B"]], jac[:, at["beta"]] = share, -share * lx2
        if floor > -np.inf:
            jac[:, at["E"]] = np.exp(floor - total)
        return total, jac


EXPONENTS = ("alpha", "beta")
# Decorator of whatever a wild parameter may reach: what overflows becomes inf, which JSON then holds as null.
quiet = np.errstate(all="ignore")
FORMS = {
    form.name: form
    for form in (
        Form("power", "y = A x^-alpha", ("A", "alpha")),
        Form("saturating", "y = E + A x^-alpha", ("E", "A", "alpha"), ("E",)),
        Form("shifted", "y = E + A (x + B)^-alpha", ("E", "A", "alpha", "B"), ("E", "B")),
        Form("chinchilla", "y = E + A x^-alpha + B x2^-beta", ("E", "A", "alpha", "B", "beta"), ("E",)),
    )
}


def get_form(name: str) -> Form:
    """The form of that name. Raises UserError for an unknown one."""
    if name not in FORMS:
        raise unknown("form", name, FORMS, "choose one of them")
    return FORMS[name]
