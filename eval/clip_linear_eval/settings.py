"""How to evaluate, and what an evaluation gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_linear.errors import UserError
from clip_linear_eval.datasets import EvalSet
from clip_linear_eval.features import check_precision

if TYPE_CHECKING:
    from clip_linear_eval.scores import Scores


@dataclass(kw_only=True)
class Settings:
    """How to evaluate; every field that changes a number goes into the rows' ``eval_id``."""

    dataset_type: str = "auto"
    classnames: Any = None
    templates: Any = None
    batch_size: int = 64
    precision: str = "fp32"
    device: str = "cpu"
    limit: int | None = None
    on_error: str = "fail"
    restrict: bool = False
    labels: str | None = None
    split: str = "test"
    hierarchy: str | Path | None = None
    ks: tuple[int, ...] = (1, 5)
    workers: int | None = None
    cache: Path | None = None
    rank: int = 0
    world_size: int = 1

    def check(self) -> None:
        """Raise UserError for values that mean nothing."""
        self.precision = check_precision(self.precision)
        if self.on_error not in ("skip", "fail"):
            raise UserError(f"--on-error {self.on_error!r} is neither skip nor fail")
        if min(self.batch_size, *self.ks, 1 if self.limit is None else self.limit) < 1:
            raise UserError("--batch-size, --limit and --topk must be 1 or more")


@dataclass(kw_only=True)
class Evaluation:
    """The rows of one evaluation and what the page, the predictions file and comparisons need."""

    rows: list[dict[str, Any]]
    data: EvalSet | None = None  # None for retrieval
    scores: Scores | None = None
    notes: list[str] = field(default_factory=list)
