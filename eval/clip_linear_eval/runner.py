"""What ``clip-linear eval`` does: every checkpoint on every data set, each result written once and never redone."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clip_linear.errors import UserError
from clip_linear_eval import predictions
from clip_linear_eval.models import Loaded, expand, load
from clip_linear_eval.saved import load_rows, out_path, save_rows
from clip_linear_eval.settings import Evaluation, Settings
from clip_linear_eval.shown import Progress
from clip_linear_eval.tasks import Task, find_tasks
from clip_linear_eval.world import World, open_world
from clip_linear_eval.zeroshot import measure


def cache_folder() -> Path | None:
    """Where tokens and classifiers are kept: $CLIP_LINEAR_CACHE, else below the user's cache folder; None where that
    cannot be written (a container's read-only home), which costs time only."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("CLIP_LINEAR_CACHE") or Path(base) / "clip_linear")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def run(args: argparse.Namespace, say: Callable[[str], None]) -> tuple[list[Evaluation], bool]:
    """Evaluate as the parsed flags say: (evaluations, whether this process is the one that prints).

    Raises UserError and RunError.
    """
    tasks = find_tasks(args.dataset, args.tasks, Path(args.data_root or os.environ.get("CLIP_LINEAR_DATA") or "."))
    plan = Plan(args, say)
    with open_world(args.device) as world:
        checkpoints = expand(args.pretrained)
        if args.html and len(checkpoints) * len(tasks) > 20:
            raise UserError(f"--html shows at most 20 evaluations, not {len(checkpoints) * len(tasks)}")
        evaluations = []
        for weights in checkpoints:
            loaded = load(args.model, weights, precision=args.precision, device=world.device)
            evaluations += [plan.one(loaded, task, world) for task in tasks]
        if world.rank == 0:
            plan.finish(evaluations)
        return evaluations, world.rank == 0


class Plan:
    """The output files of one call, checked before anything is computed."""

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        self.args, self.say = args, say
        self.out = out_path(args.out)
        self.predictions = predictions.check_path(args.predictions) if args.predictions else None
        self.other = predictions.read_predictions(predictions.check_path(args.compare)) if args.compare else None
        if bool(args.probe) != bool(args.train_dataset):
            raise UserError("--probe and --train-dataset go together: what to fit, and on which images")
        self.lines: list[dict[str, Any]] = []
        # Predictions of an earlier call are not kept, so what needs them is computed again.
        self.again = bool(args.predictions or args.compare or args.html or args.per_class)

    def one(self, loaded: Loaded, task: Task, world: World) -> Evaluation:
        """One model on one task: measured, or taken from ``--out`` where it stands already."""
        settings = settings_of(self.args, task, world)
        name = task.name or task.dataset
        if self.args.probe:
            return self._probe(loaded, task, settings)
        with Progress(name, world.rank == 0 and not self.args.json) as progress:
            evaluation = measure(
                loaded.model,
                loaded.preprocess,
                loaded.tokenizer,
                task.dataset,
                settings,
                info=loaded.info | ({"dataset": name, "task_version": task.version} if task.name else {}),
                progress=progress,
                done=self._standing,
            )
        if world.rank == 0:
            for note in evaluation.notes:
                self.say(f"{name}: {note}")
            self._keep(evaluation)
        return evaluation

    def _probe(self, loaded: Loaded, task: Task, settings: Settings) -> Evaluation:
        from clip_linear_eval.probe import measure_probe

        evaluation = measure_probe(
            self.args.probe,
            loaded.model,
            loaded.preprocess,
            self.args.train_dataset,
            task.dataset,
            settings,
            info=loaded.info,
        )
        self._keep(evaluation)
        return evaluation

    def _standing(self, eval_id: str) -> list[dict[str, Any]]:
        if self.out is None or self.again:
            return []
        return [row for row in load_rows(self.out) if row.get("eval_id") == eval_id]

    def _keep(self, evaluation: Evaluation) -> None:
        if evaluation.data is not None and (self.predictions or self.other is not None):
            lines = predictions.lines_of(evaluation)
            self.lines += lines
            if self.other is not None:
                evaluation.rows.append(predictions.compare(lines, self.other, evaluation.rows[0]))
        if self.out is not None:
            save_rows(self.out, evaluation.rows)

    def finish(self, evaluations: list[Evaluation]) -> None:
        """Write predictions, the per-class table and the page."""
        if self.predictions:
            predictions.write_predictions(self.predictions, self.lines)
        if self.args.per_class:
            from clip_linear_eval.perclass import write_table

            write_table(Path(self.args.per_class), evaluations)
        if self.args.html:
            from clip_linear_eval.evalpage import write_page

            write_page(Path(self.args.html), evaluations)
            self.say(f"wrote {self.args.html}")


def settings_of(args: argparse.Namespace, task: Task, world: World) -> Settings:
    """The settings of one task on this rank: the task's where it says something, the flags' otherwise; a flag that
    was given wins over the task."""
    chosen = Settings(
        dataset_type=args.dataset_type,
        classnames=args.classnames,
        templates=args.templates,
        batch_size=args.batch_size,
        precision=args.precision,
        device=world.device,
        limit=args.limit,
        on_error=args.on_error,
        restrict=args.restrict,
        labels=args.labels,
        split=args.split,
        hierarchy=args.hierarchy,
        ks=tuple(sorted({1, *args.topk})),
        workers=args.workers,
        cache=cache_folder(),
        rank=world.rank,
        world_size=world.size,
    )
    defaults = Settings()
    of_task: tuple[tuple[str, Any], ...] = (
        ("dataset_type", task.type),
        ("classnames", task.classnames),
        ("templates", task.templates),
        ("labels", task.labels),
        ("restrict", task.restrict),
        ("split", task.split),
    )
    untouched = {f: v for f, v in of_task if v is not None and getattr(chosen, f) == getattr(defaults, f)}
    return dataclasses.replace(chosen, **untouched)
