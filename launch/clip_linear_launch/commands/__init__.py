"""The actions of ``clip-linear launch``, each a function of the parsed arguments that prints and returns a code."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable

_MODULES = {
    "plan": "plan",
    "run": "run",
    "retry": "run",
    "status": "watch",
    "logs": "watch",
    "cancel": "manage",
    "clean": "manage",
    "export": "manage",
    "collect": "gather",
    "report": "gather",
}


def action(name: str) -> Callable[[argparse.Namespace], int]:
    """The function of an action, imported now."""
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    function: Callable[[argparse.Namespace], int] = getattr(module, name)
    return function
