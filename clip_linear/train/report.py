"""Where a run's numbers go: metrics.jsonl always, the console, TensorBoard and W&B. Rank 0 only."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from clip_linear.errors import UserError
from clip_linear.files import append_jsonl
from clip_linear.train.config import TrainConfig
from clip_linear.train.folder import EVALS, METRICS

log = logging.getLogger(__name__)


def check_targets(config: TrainConfig) -> None:
    """Raise UserError when --report-to names a logger that is unknown or not installed (before anything is built)."""
    import importlib.util

    for name in targets(config):
        module = {"tensorboard": "tensorboard", "wandb": "wandb"}.get(name)
        if module is None:
            raise UserError(f"--report-to {name!r} is not tensorboard, wandb or all")
        if importlib.util.find_spec(module) is None:
            raise UserError(f"--report-to {name} needs the package {module}; run: pip install 'clip-linear[{name}]'")


def targets(config: TrainConfig) -> list[str]:
    """The loggers that --report-to names."""
    names = [n.strip() for n in config.report_to.split(",") if n.strip()]
    return ["tensorboard", "wandb"] if "all" in names else names


class Report:
    """Writes the rows of a run."""

    def __init__(self, run_dir: Path, config: TrainConfig, step: int) -> None:
        self.run_dir, self.config = run_dir, config
        self.board: Any = None
        self.wandb: Any = None
        if "tensorboard" in targets(config):
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)
        if "wandb" in targets(config):
            import wandb

            self.wandb = wandb.init(
                project=config.wandb_project_name,
                name=config.name or config.run_id,
                id=config.run_id,
                resume="allow",  # one W&B run across all attempts
                notes=config.wandb_notes,
                config={"model": config.model, **config.openclip, **config.ours},
                dir=str(run_dir),
            )
        self.bar = _bar(config.budget) if sys.stderr.isatty() else None

    def row(self, row: dict[str, Any]) -> None:
        """One logged step."""
        append_jsonl(self.run_dir / METRICS, row)
        self._send("train", row)
        rate, done = row["samples_per_s"], row["samples_seen"]
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done, loss=row["loss"], rate=rate)
            return
        budget = self.config.budget
        eta = (budget - done) / rate if rate else 0.0
        log.info(
            f"step {row['step']}/{self.config.steps}  samples {done}/{budget}  loss {row['loss']:.4f}  "
            f"lr {row['lr']:.2e}  scale {row['logit_scale']:.2f}  {rate:.0f} samples/s  "
            f"data wait {row['data_wait_frac']:.0%}  eta {_span(max(0.0, eta))}"
        )

    def evaluated(self, step: int, samples_seen: int, rows: list[dict[str, Any]]) -> None:
        """The rows of one evaluation, also kept as a history in evals.jsonl."""
        append_jsonl(self.run_dir / EVALS, {"step": step, "samples_seen": samples_seen, "rows": rows})
        values = {f"{r.get('dataset')}/{r.get('metric')}": r.get("value") for r in rows}
        self._send("eval", values | {"step": step, "samples_seen": samples_seen})
        for name, value in values.items():
            log.info("  %s %s", name, f"{value:.4f}" if isinstance(value, float) else value)

    def _send(self, group: str, values: dict[str, Any]) -> None:
        numbers = {f"{group}/{k}": v for k, v in values.items() if isinstance(v, int | float) and v is not True}
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, values["step"])
        if self.wandb is not None:
            self.wandb.log(numbers, step=values["step"])

    def close(self) -> None:
        """Flush everything."""
        if self.bar is not None:
            self.bar.stop()
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()


def _bar(budget: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("samples  loss {task.fields[loss]:.4f}  {task.fields[rate]:.0f}/s"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    bar.add_task("train", total=budget, loss=float("nan"), rate=0.0)
    bar.start()
    return bar


def _span(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
