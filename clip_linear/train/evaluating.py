"""Evaluation inside training: when, with which weights, and what happens when it fails."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, Protocol

import torch

from clip_linear.errors import RunError
from clip_linear.files import append_jsonl, read_jsonl, write_json
from clip_linear.train import folder, rng, saving

if TYPE_CHECKING:
    from clip_linear.train.loop import Trainer

log = logging.getLogger(__name__)
Row = dict[str, Any]


class Evaluate(Protocol):
    """Evaluates a model on all ranks; rank 0's rows count."""

    def __call__(
        self,
        model: Any,
        tokenizer: Any,
        preprocess_val: Any,
        *,
        device: torch.device,
        precision: str,
        rank: int,
        world_size: int,
    ) -> list[Row]: ...


def is_due(trainer: Trainer, last: bool) -> bool:
    """Whether to evaluate now: at the end, and where the flags say so unless an earlier attempt did. A collective."""
    if trainer.evaluate is None or not (last or trainer.cadence.evaluates(trainer.step)):
        return False
    done = any(row.get("step") == trainer.step for row in read_jsonl(trainer.run_dir / folder.EVALS))
    return last or not trainer.world.broadcast(done)


def evaluate(trainer: Trainer, last: bool) -> None:
    """Evaluate; the checkpoint of this step must be on disk. An error is noted; it ends the run only at its end, or
    where there are several ranks, which cannot know of each other's errors."""
    config, world = trainer.config, trainer.world
    at = {"step": trainer.step, "samples_seen": trainer.step * config.global_batch}
    averaged = trainer.ema.swapped_in() if trainer.ema is not None else contextlib.nullcontext()
    assert trainer.evaluate is not None, "is_due was asked"
    trainer.model.eval()
    try:
        with rng.untouched(world.device), averaged:
            rows = trainer.evaluate(
                saving.to_evaluate(trainer),
                trainer.parts.tokenizer,
                trainer.parts.preprocess_val,
                device=world.device,
                precision=config.precision,
                rank=world.rank,
                world_size=world.world_size,
            )
    except (RunError, RuntimeError, ValueError, OSError) as error:
        if world.is_first:
            append_jsonl(trainer.run_dir / folder.EVALS, at | {"error": str(error)})
        if last or world.world_size > 1:
            raise
        log.warning("evaluation at step %d failed, training goes on: %s", trainer.step, error)
        rows = []
    trainer.model.train()
    if world.is_first and rows:
        rows = [row | _at(row, at["samples_seen"]) for row in rows]
        write_json(trainer.run_dir / folder.EVAL, rows)
        trainer.report.evaluated(trainer.step, at["samples_seen"], rows)


def _at(row: Row, samples: int) -> Row:
    """What a row says of the point in training at which it was measured."""
    gmacs = row.get("gmacs")
    return {"samples_seen": samples, "gmacs_total": None if gmacs is None else gmacs * samples}
