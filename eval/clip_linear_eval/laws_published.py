"""Published laws, to draw beside ours where metric, data set, unit and x agree, and only there."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from clip_linear_eval.laws import Array

# How their x follows from ours: GFLOPs are twice our GMACs (a multiply–accumulate is two operations).
_PER_OUR_X = {("gmacs_total", "gflops_total"): 2.0}
_IMAGENET = ("imagenet1k", "imagenet-1k", "imagenet", "in1k", "ilsvrc2012")


@dataclass(frozen=True, kw_only=True)
class Published:
    """One law as printed: y = E + A (x + B)^-alpha, with where it comes from."""

    name: str
    source: str
    x: str
    metric: str
    dataset: str
    unit: str
    E: float
    A: float
    alpha: float
    B: float
    x_min: float | None
    x_max: float | None
    note: str
    per_our_x: float = 1.0  # their x for one of ours

    def predict(self, x: ArrayLike) -> Array:
        """Their y at our x."""
        return self.E + self.A * (self.per_our_x * np.asarray(x, dtype=float) + self.B) ** -self.alpha

    @property
    def our_range(self) -> tuple[float, float]:
        """The x (ours) over which it was fitted; 0 or infinity where that is not known."""
        low, high = self.x_min or 0.0, self.x_max or np.inf
        return low / self.per_our_x, high / self.per_our_x


def _folder() -> Path:
    here = Path(__file__).resolve().parent
    return here / "published" if (here / "published").is_dir() else here.parent / "published"


@cache
def all_published() -> tuple[Published, ...]:
    """Every law of published/laws.csv."""
    with open(_folder() / "laws.csv", newline="", encoding="utf-8") as f:
        rows = list(csv.DictReader(f))
    return tuple(
        Published(
            name=row["name"],
            source=row["source"],
            x=row["x"],
            metric=row["metric"],
            dataset=row["dataset"],
            unit=row["unit"],
            note=row["note"],
            E=float(row["E"]),
            A=float(row["A"]),
            alpha=float(row["alpha"]),
            B=float(row["B"]),
            x_min=float(row["x_min"]) if row["x_min"] else None,
            x_max=float(row["x_max"]) if row["x_max"] else None,
        )
        for row in rows
    )


def matching(x: str, metric: str, dataset: str, unit: str | None) -> list[Published]:
    """The published laws of the same thing: metric, unit, x (converted where only its unit differs) and data set.

    A law without a data set (a loss on its own training data) matches any.
    """
    found = []
    for law in all_published():
        per_x = 1.0 if law.x == x else _PER_OUR_X.get((x, law.x))
        same_set = not law.dataset or _plain(dataset) == _plain(law.dataset)
        if per_x is not None and (law.metric, law.unit) == (metric, unit) and same_set:
            found.append(replace(law, per_our_x=per_x))
    return found


def _plain(dataset: str) -> str:
    name = dataset.lower().rsplit("/", 1)[-1].removeprefix("wds_")
    return "imagenet1k" if name in _IMAGENET else name
