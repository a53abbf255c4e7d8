"""Rows on the terminal: a table with colour there, plain columns in a pipe."""

from __future__ import annotations

import sys
import time
from typing import Any


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print model, data set, metric, value with its interval, n and bad images."""
    header = ("model", "dataset", "metric", "value", "95 % interval", "n", "bad")
    lines = [
        (
            _model(row),
            str(row["dataset"]),
            str(row["metric"]),
            _value(row, "value"),
            f"{_value(row, 'ci_low')} – {_value(row, 'ci_high')}",
            str(row["n"]),
            str(len(row.get("errors") or ())),
        )
        for row in rows
    ]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(*header)
        for line in lines:
            table.add_row(*line)
        Console().print(table)
        return
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
    for line in (header, *lines):
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() + "\n")


def _model(row: dict[str, Any]) -> str:
    seen = row.get("samples_seen")
    return f"{row.get('model')}" + (f" @{seen}" if seen is not None else "")


def _value(row: dict[str, Any], column: str) -> str:
    value = row[column]
    if value is None:
        return "-"
    return f"{100 * value:.2f} %" if row["unit"] == "fraction" else f"{value:.3f}"


class Progress:
    """Images done: a bar on a terminal, a line every ten seconds otherwise, nothing where it is switched off."""

    def __init__(self, name: str, on: bool) -> None:
        self.name, self.on = name, on
        self.bar: Any = None
        self.next_s = time.monotonic() + 10

    def __enter__(self) -> Progress:
        if self.on and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress as Bar

            self.bar = Bar(console=Console(stderr=True), transient=True)
            self.bar.start()
            self.task = self.bar.add_task(self.name, total=None)
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Note that ``done`` of ``total`` images are scored."""
        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=total)
        elif self.on and time.monotonic() > self.next_s:
            self.next_s = time.monotonic() + 10
            sys.stderr.write(f"{self.name}: {done} of {total} images\n")
