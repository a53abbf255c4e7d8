"""Numbers of the command line with their limits: ``type=integer(1)`` in argparse."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def integer(least: int) -> Callable[[str], int]:
    """A whole number ≥ ``least``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return parse


def number(low: float, high: float = math.inf) -> Callable[[str], float]:
    """A finite number in [low, high]."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high):
            limits = f"from {low:g} to {high:g}" if math.isfinite(high) else f"of at least {low:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {limits}")
        return value

    return parse
