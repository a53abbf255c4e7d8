"""Rows on the terminal: a table with colour there, plain columns in a pipe."""

from __future__ import annotations

import sys
from typing import Any


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print model, data set, metric, value with its interval, n and bad images."""
    header = ("model", "dataset", "metric", "value", "95 % interval", "n", "bad")
    lines = [
        (
            _model(row),
            str(row["dataset"]),
            str(row["metric"]),
            _percent(row["value"]),
            f"{_percent(row['ci_low'])} – {_percent(row['ci_high'])}",
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


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"
