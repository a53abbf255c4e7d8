"""How many seeds show a difference of exponents: the power of the t test on Δα between two variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.stats import nct
from scipy.stats import t as t_dist

from clip_linear.errors import UserError

MOST_SEEDS = 200


@dataclass(frozen=True)
class Power:
    """What ``seeds`` runs per size and variant can show."""

    seeds: int
    dof: int
    se: float  # of Δα
    power: float  # chance that the asked difference is found significant
    half_width: float  # of the 95 % interval of Δα
    detectable: float  # smallest difference found with the wanted power


def design(
    sizes: Sequence[float], noise: float, seeds: int, delta: float, *, wanted: float = 0.8, comparisons: int = 1
) -> Power:
    """The power of ``sizes`` × ``seeds`` runs of each of two variants; ``noise`` is the sd of ln y between runs.

    α of a power law has variance noise² / (seeds · Σ(ln x − mean)²); the test is two-sided at 5 % (divided by
    ``comparisons`` as Bonferroni does), with 2 · seeds · sizes − 4 degrees of freedom. Raises UserError.
    """
    u = np.log(np.asarray(_checked(sizes), dtype=float))
    _positive(noise, "noise", "the relative run-to-run deviation, e.g. 0.02")
    _positive(delta, "delta", "the difference of exponents to find, e.g. 0.03")
    if not 0 < wanted < 1:
        raise UserError(f"power {wanted} is not between 0 and 1; e.g. 0.8")
    dof = 2 * seeds * len(u) - 4
    if dof < 1:
        return Power(seeds, dof, float("nan"), 0.0, float("inf"), float("inf"))
    se = float(noise * np.sqrt(2 / (seeds * ((u - u.mean()) ** 2).sum())))
    limit = float(t_dist.isf(0.025 / comparisons, dof))

    def found(difference: float) -> float:
        shift = difference / se
        power = float(nct.sf(limit, dof, shift) + nct.cdf(-limit, dof, shift))
        return power if np.isfinite(power) else 1.0  # scipy gives nan where the difference is dozens of se

    top = se
    while found(top) <= wanted:
        top *= 2
    smallest = float(brentq(lambda d: found(d) - wanted, 0.0, top))
    return Power(seeds, dof, se, found(delta), limit * se, smallest)


def seeds_needed(
    sizes: Sequence[float], noise: float, delta: float, *, wanted: float = 0.8, comparisons: int = 1
) -> list[Power]:
    """Designs with 1, 2, … seeds up to the first that reaches the wanted power. Raises UserError if none can."""
    designs: list[Power] = []
    while not designs or designs[-1].power < wanted:
        if len(designs) == MOST_SEEDS:
            raise UserError(
                f"{MOST_SEEDS} seeds do not show {delta:g} at noise {noise:g}; add sizes or spread them wider"
            )
        designs.append(design(sizes, noise, len(designs) + 1, delta, wanted=wanted, comparisons=comparisons))
    return designs


def _checked(sizes: Sequence[float]) -> Sequence[float]:
    if len(set(sizes)) < 2 or min(sizes, default=0.0) <= 0 or not np.isfinite(sizes).all():
        raise UserError(f"sizes {list(sizes)} must be two or more different positive numbers, e.g. 22e6,86e6,304e6")
    return sizes


def _positive(value: float, name: str, meaning: str) -> None:
    if not (np.isfinite(value) and value > 0):
        raise UserError(f"{name} {value} is not a positive number: {meaning}")
