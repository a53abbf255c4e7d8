"""The forms of scaling laws, as log-sum-exp of terms in log parameters, with analytic Jacobians.

Every form is ``ln y = logsumexp(terms)``: ``ln E`` (the floor), ``ln A - α ln(x + B)`` (the power term; the shift B
only in ``shifted``) and ``ln B - β ln x2`` (the second factor, only in ``chinchilla``). α > 0: y falls as x grows.
A coefficient of exactly zero is ``-inf`` in the parameter vector: its term vanishes and its Jacobian column is zero.

Sources: Hoffmann et al. 2022 (arXiv 2203.15556) for ``chinchilla``, Nezhurina et al. 2025 (arXiv 2506.04598) for
``shifted``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clip_linear.errors import unknown

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Points:
    """The measured points of one law: x, y > 0 of shape [n]; x2 (chinchilla) and sigma (sd of ln y) where given."""

    x: Array
    y: Array
    x2: Array | None = None
    sigma: Array | None = None

    @staticmethod
    def of(x: ArrayLike, y: ArrayLike, x2: ArrayLike | None = None, sigma: ArrayLike | None = None) -> Points:
        """Points from anything array-like, sorted by x (then x2, y), so that the order of rows never matters."""
        columns = [np.asarray(c, dtype=float).ravel() for c in (x, y)]
        extra = [None if c is None else np.asarray(c, dtype=float).ravel() for c in (x2, sigma)]
        order = np.lexsort([columns[1], *([] if extra[0] is None else [extra[0]]), columns[0]])
        first, second = (None if c is None else c[order] for c in extra)
        return Points(x=columns[0][order], y=columns[1][order], x2=first, sigma=second)

    def take(self, index: NDArray) -> Points:
        """The points at an index or mask."""
        return Points(
            x=self.x[index],
            y=self.y[index],
            x2=None if self.x2 is None else self.x2[index],
            sigma=None if self.sigma is None else self.sigma[index],
        )

    @property
    def n(self) -> int:
        return len(self.x)

    def with_more(self, more: Points) -> Points:
        """These points and ``more``, which has the same columns."""

        def both(a: Array | None, b: Array | None) -> Array | None:
            return None if a is None or b is None else np.concatenate([a, b])

        x, y = np.concatenate([self.x, more.x]), np.concatenate([self.y, more.y])
        return Points.of(x, y, both(self.x2, more.x2), both(self.sigma, more.sigma))

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

    def theta(self, params: dict[str, float]) -> Array:
        """Named parameters as θ."""
        with np.errstate(divide="ignore"):
            return np.array([params[p] if p in EXPONENTS else np.log(params[p]) for p in self.params])

    def log_y(self, theta: Array, x: Array, x2: Array | None = None) -> Array:
        """ln y at x (and x2), shape [n]."""
        return self._sum(self._terms(theta, x, x2)[0])

    def log_y_jac(self, theta: Array, x: Array, x2: Array | None = None) -> tuple[Array, Array]:
        """ln y, shape [n], and its derivatives by θ, shape [n, k]."""
        terms, slopes = self._terms(theta, x, x2)
        total = self._sum(terms)
        jac = np.zeros((len(x), self.k))
        for term, parts in zip(terms, slopes):
            share = np.exp(term - total)  # this term's share of y
            for j, d in parts:
                jac[:, j] += share * d
        return total, jac

    @staticmethod
    def _sum(terms: list[Array]) -> Array:
        total = terms[0]
        for term in terms[1:]:
            total = np.logaddexp(total, term)
        return total

    def _terms(self, theta: Array, x: Array, x2: Array | None) -> tuple[list[Array], list[list[tuple[int, Array]]]]:
        ones = np.ones_like(x)
        at = dict(zip(self.params, range(self.k)))
        a, alpha = at["A"], at["alpha"]
        shifted = self.name == "shifted"
        shift = np.exp(theta[at["B"]]) if shifted else 0.0
        lx = np.log(x + shift)
        terms = [theta[a] - theta[alpha] * lx]
        slopes = [[(a, ones), (alpha, -lx)]]
        if shifted:
            slopes[0].append((at["B"], -theta[alpha] * shift / (x + shift)))
        if self.name == "chinchilla":
            assert x2 is not None
            lx2 = np.log(x2)
            terms.append(theta[at["B"]] - theta[at["beta"]] * lx2)
            slopes.append([(at["B"], ones), (at["beta"], -lx2)])
        if "E" in at and theta[at["E"]] > -np.inf:
            terms.append(np.full_like(x, theta[at["E"]]))
            slopes.append([(at["E"], ones)])
        return terms, slopes


EXPONENTS = ("alpha", "beta")
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
