"""A fitted law: its numbers, its doubts, and what it predicts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import t as t_dist

from clip_linear_eval.fit_intervals import LEVEL, Interval
from clip_linear_eval.fit_optimize import Problem
from clip_linear_eval.fit_screen import Caution, Dropped
from clip_linear_eval.laws import Array, Points, get_form, quiet


@dataclass(frozen=True, kw_only=True)
class Law:
    """A fitted law.

    ``params`` are natural (A, alpha, E, …); ``se`` belongs to them, ``cov`` to θ (logs of all but the exponents,
    see ``cov_of``); an interval's end is None where the data set none. Errors are fractions.
    """

    form: str
    objective: str
    n: int
    n_rows: int
    cost: float
    params: dict[str, float]
    log_params: tuple[float, ...]  # θ: logs of all but the exponents, −inf for a coefficient of 0
    ci95: dict[str, Interval] | None
    interval_method: str | None
    se: dict[str, float | None]
    cov: list[list[float]] | None
    cov_of: list[str]
    sigma: float | None
    delta: float | None
    dof: int
    aicc: float | None
    bic: float | None
    loo: float | None
    identified: dict[str, bool | None]
    without_outlier: dict[str, Any] | None
    certificate: dict[str, Any]
    lack_of_fit: dict[str, float] | None
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    noise_unit: float = 1.0  # weighted fits: sigma of the typical point, of which ``sigma`` is a multiple
    predictions: list[dict[str, Any]] = field(default_factory=list)
    frontier: str = "none"
    hold_out: dict[str, Any] | None = None
    bootstrap: dict[str, Any] | None = None
    selection: dict[str, Any] | None = None
    warnings: tuple[Caution, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    points: Points = field(repr=False, compare=False)

    @property
    def problem(self) -> Problem:
        """The law's minimisation, to go on from it."""
        return Problem(get_form(self.form), self.points, self.objective, self.delta)

    @quiet
    def predict(self, x: ArrayLike, x2: ArrayLike | None = None) -> Array:
        """y of the law (its median) at x, and x2 for ``chinchilla``."""
        return np.exp(self._log_y(x, x2)[0])

    @quiet
    def band(
        self, x: ArrayLike, x2: ArrayLike | None = None, *, prediction: bool = False
    ) -> tuple[Array, Array] | None:
        """95 % limits of the law at x, with ``prediction`` of a new measurement; None without degrees of freedom."""
        if self.cov is None or self.dof < 1 or self.sigma is None:
            return None
        log_y, jac = self._log_y(x, x2)
        var = np.maximum(np.einsum("ni,ij,nj->n", jac, np.array(self.cov), jac), 0.0)
        half = t_dist.ppf((1 + LEVEL) / 2, self.dof) * np.sqrt(
            var + (self.log_noise(np.exp(log_y)) ** 2 if prediction else 0)
        )
        return np.exp(log_y - half), np.exp(log_y + half)

    def log_noise(self, y: Array) -> Array:
        """Standard deviation of ln y about the law, at values y of the law (weighted fits: at the typical weight)."""
        assert self.sigma is not None
        if self.objective == "linear":
            return self.sigma / y
        return np.full_like(y, self.sigma * self.noise_unit)

    def local_slope(self, x: ArrayLike) -> Array:
        """−d ln y / d ln x: the exponent that a pure power law would show near x."""
        x, h = np.asarray(x, dtype=float), 1e-5
        return (self._log_y(x * np.exp(-h), None)[0] - self._log_y(x * np.exp(h), None)[0]) / (2 * h)

    def to_json(self) -> dict[str, Any]:
        """The group's entry in fit.json."""
        whole = {k: v for k, v in asdict(replace(self, points=Points.of([1.0], [1.0]))).items() if k != "points"}
        whole.pop("dropped")
        whole.pop("warnings")
        return plain(whole)

    @classmethod
    def from_json(cls, group: dict[str, Any], points: Points | None = None) -> Law:
        """A law from a group's entry in fit.json, to predict and draw bands with; ``points`` only to fit further."""
        known = {f.name for f in fields(cls)} - {"points"}
        values = {k: v for k, v in group.items() if k in known}
        values["log_params"] = tuple(-np.inf if v is None else v for v in values["log_params"])
        return cls(**values, points=points or Points.of([1.0], [1.0]))

    @property
    def theta(self) -> Array:
        """The parameters as the form's vector."""
        return np.array(self.log_params)

    def _log_y(self, x: ArrayLike, x2: ArrayLike | None) -> tuple[Array, Array]:
        x, z = np.broadcast_arrays(
            np.atleast_1d(np.asarray(x, dtype=float)), 1.0 if x2 is None else np.asarray(x2, float)
        )
        return get_form(self.form).log_y_jac(self.theta, x, z)


def plain(value: Any) -> Any:
    """The same as JSON can hold it: infinite and undefined numbers become None."""
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value
