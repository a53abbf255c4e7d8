"""The two errors that a command turns into one clear line; anything else is a bug and keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A user's mistake: says the value, what is allowed and what to do. Commands print it and exit with 2."""


class RunError(RuntimeError):
    """A run that cannot go on although nobody gave wrong input (diverged, data gone). Commands exit with 1."""


def unknown(kind: str, value: str, known: Iterable[str], hint: str) -> UserError:
    """The error for a name that is not known, with the nearest known ones; ``hint`` says what to run or do."""
    names = sorted(known)
    near = difflib.get_close_matches(value, names, n=3, cutoff=0.5)
    if near:
        allowed = f"did you mean {' or '.join(repr(n) for n in near)}?"
    else:
        allowed = f"known: {', '.join(names)}" if len(names) <= 30 else f"{len(names)} are known"
    return UserError(f"unknown {kind} {value!r} ({allowed}); {hint}")
