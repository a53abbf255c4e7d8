"""SIGUSR2 ("continue me") and SIGTERM ("save and go") as a flag that the loop reads at its step boundaries."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

# Ordered: when ranks saw different signals, the stronger one (TERM) decides.
NOTHING, CONTINUE, TERMINATE = 0, 1, 2
EXIT_CODES = {CONTINUE: 75, TERMINATE: 143}
_MEANING = {signal.SIGUSR2: CONTINUE, signal.SIGTERM: TERMINATE}


class StopFlag:
    """Install as a context; ``asked`` is NOTHING, CONTINUE or TERMINATE. A second signal ends the process at once.

    Data workers inherit the handler and ignore both signals: Slurm signals every process of a step, and the reader
    must live until the checkpoint is written. They end when their parent does.
    """

    def __init__(self) -> None:
        self.asked = NOTHING
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopFlag:
        self._before = {number: signal.signal(number, self._handle) for number in _MEANING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return
        if self.asked:
            os._exit(128 + number)
        self.asked = _MEANING[signal.Signals(number)]
