"""What watches the numbers: non-finite steps, loss spikes, the clamp of logit_scale."""

from __future__ import annotations

import logging
import math
from typing import Any

from clip_linear.errors import RunError

log = logging.getLogger(__name__)
MAX_SCALE = 100.0  # OpenCLIP clamps logit_scale there
WINDOW = 1000  # steps over which bad ones are counted
SPIKE_DECAY = 0.98  # of the running mean and variance of the loss
SPIKE_SIGMAS = 6.0
SPIKE_AFTER = 100  # steps before spikes are looked for


class Guards:
    """Counts per step; ``state`` goes into the checkpoint, so a resumed run judges as an uninterrupted one."""

    def __init__(self, max_bad_steps: int) -> None:
        self.max_bad_steps = max_bad_steps
        self.bad: list[int] = []  # steps within the window
        self.bad_total = self.spikes = self.clamped = self.seen = 0
        self.mean = self.variance = 0.0

    def look(self, step: int, loss: float, norm: float, scale: float, skipped: bool) -> None:
        """Judge one step. Raises RunError when too many were not finite."""
        if skipped:
            self._bad(step, loss, norm)
            return
        if scale >= MAX_SCALE * (1 - 1e-6):
            self.clamped += 1
            if self.clamped == 1:
                log.warning("step %d: logit_scale reached its clamp of %.0f", step, MAX_SCALE)
        if self.seen >= SPIKE_AFTER and loss - self.mean > SPIKE_SIGMAS * math.sqrt(self.variance) + 1e-3:
            self.spikes += 1
            log.warning("step %d: loss spike, %.4g after a mean of %.4g (norm %.3g)", step, loss, self.mean, norm)
        weight = max(1 - SPIKE_DECAY, 1 / (self.seen + 1))
        gap = loss - self.mean
        self.mean += weight * gap
        self.variance = (1 - weight) * (self.variance + weight * gap * gap)
        self.seen += 1

    def _bad(self, step: int, loss: float, norm: float) -> None:
        self.bad_total += 1
        self.bad = [s for s in self.bad if s > step - WINDOW] + [step]
        what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
        if len(self.bad) > self.max_bad_steps:
            raise RunError(
                f"diverged: {what} at step {step}, the {len(self.bad)}th non-finite step within {WINDOW} "
                f"(--max-bad-steps {self.max_bad_steps}); the last checkpoint is from before or among them and finite: "
                "lower --lr, raise --warmup or set --grad-clip-norm 1"
            )
        log.warning("step %d: %s, update skipped (%d of %d allowed)", step, what, len(self.bad), self.max_bad_steps)

    def counts(self) -> dict[str, int]:
        """For metrics.jsonl."""
        return {"bad_steps": self.bad_total, "loss_spikes": self.spikes, "clamped_steps": self.clamped}

    def state(self) -> dict[str, Any]:
        """For the checkpoint: builtins."""
        names = ("bad_total", "spikes", "clamped", "seen", "mean", "variance")
        return {name: getattr(self, name) for name in names} | {"bad": list(self.bad)}

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what ``state`` gave."""
        for name, value in state.items():
            setattr(self, name, value)
