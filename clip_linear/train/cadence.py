"""When to log, save and evaluate: functions of the step alone (and of rank 0's clock for minutes)."""

from __future__ import annotations

import time
from typing import Any

from clip_linear.train.config import TrainConfig
from clip_linear.train.flags import split_often

DEFAULT_MINUTES = 15.0  # when no flag says how often to save: what a killed run may lose


class Cadence:
    """All of a run's rhythms. Steps count from 1: ``saves(1)`` asks about the state after the first step."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        asked = (config.save_every_steps, config.save_every_samples, config.save_every_minutes)
        self.minutes = config.save_every_minutes or (None if any(asked) else DEFAULT_MINUTES)
        self._last = time.monotonic()

    def logs(self, step: int) -> bool:
        """The first, every n-th and the last step."""
        return step == 1 or step % self.config.log_every_n_steps == 0 or step == self.config.steps

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        every = self.config.save_every_steps
        return step > 0 and bool(
            (every and step % every == 0)
            or self._crosses(step, self.config.save_every_samples)
            or self.is_milestone(step)
            or (self.ends_epoch(step) and self.config.save_frequency > 0)
        )

    def is_milestone(self, step: int) -> bool:
        """Whether this step's checkpoint is kept for good: --keep-every-samples, and OpenCLIP's --save-frequency epochs
        (unless --delete-previous-checkpoint)."""
        epochs = self.config.save_frequency
        kept_epoch = epochs > 0 and self.ends_epoch(step) and (step // self.config.steps_per_epoch) % epochs == 0
        return self._crosses(step, self.config.keep_every_samples) or (
            kept_epoch and not self.config.delete_previous_checkpoint
        )

    def ends_epoch(self, step: int) -> bool:
        """Whether one of OpenCLIP's epochs ends here; the end of a run that has no epochs is not one."""
        return self.config.train_num_samples is not None and step > 0 and step % self.config.steps_per_epoch == 0

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation is due after this step (the last one is the caller's)."""
        number, unit = split_often(self.config.zeroshot_frequency)
        if unit == "samples":
            return self._crosses(step, number)
        every = number * (self.config.steps_per_epoch if unit == "epochs" else 1)
        return every > 0 and step > 0 and step % every == 0

    def minutes_over(self) -> bool:
        """Whether it is time for a save by the clock (asked on every rank; the ranks then agree)."""
        return self.minutes is not None and time.monotonic() - self._last > 60 * self.minutes

    def saved(self) -> None:
        """Start the clock anew."""
        self._last = time.monotonic()

    def _crosses(self, step: int, samples: Any) -> bool:
        batch = self.config.global_batch
        return bool(samples) and step > 0 and step * batch // samples > (step - 1) * batch // samples
