"""What a sweep reads that is not there."""

from __future__ import annotations

import contextlib
from pathlib import Path

from clip_linear.data.remote import scheme
from clip_linear.data.shards import expand
from clip_linear.errors import UserError
from clip_linear_launch.expand import Run
from clip_linear_launch.sweep import Sweep


def missing_data(sweep: Sweep, runs: list[Run]) -> list[str]:
    """Training data and [eval] datasets that cannot be seen from this machine (the nodes may see others)."""
    found = []
    with contextlib.chdir(sweep.here):
        for data in _given(runs, "--train-data"):
            try:
                first = expand(data)[0]
                if scheme(first) or Path(first).exists():
                    continue
                reason = f"{first} does not exist"
            except UserError as error:
                reason = str(error)
            found.append(f"train-data {data!r} cannot be seen from here: {reason}")
        for weights in _given(runs, "--pretrained"):
            if ("/" in weights or Path(weights).suffix) and not scheme(weights) and not Path(weights).exists():
                found.append(f"pretrained {weights!r} cannot be seen from here: it does not exist")
        for path in sweep.eval.datasets:
            if ("/" in path or path.startswith(".")) and not scheme(path) and not Path(path).exists():
                found.append(f"[eval] dataset {path!r} cannot be seen from here: it does not exist")
    return found


def _given(runs: list[Run], flag: str) -> list[str]:
    """The values of a flag over all runs, each once."""
    return list(dict.fromkeys(r.argv[r.argv.index(flag) + 1] for r in runs if flag in r.argv))
