"""The parser of every command, and numbers of the command line with their limits: ``type=integer(1)``."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable
from typing import NoReturn

from clip_linear.errors import UserError


class Parser(argparse.ArgumentParser):
    """argparse's, but a wrong flag is a UserError like any other mistake: one line with the nearest flags."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError instead of printing the whole usage and exiting."""
        flag = message.removeprefix("unrecognized arguments: ").split("=")[0].split(" ")[0]
        near = difflib.get_close_matches(flag, self._option_string_actions) if flag.startswith("-") else []
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise UserError(f"{message}{hint}; run: {self.prog} --help")


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
