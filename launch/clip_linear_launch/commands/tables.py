"""Tables: rich on a terminal, plain text as wide as its cells in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Columns of text, numbers to the right; the header in the first line."""
    cells = [[_text(c) for c in row] for row in rows]
    right = [all(_is_number(row[i]) for row in cells) and bool(cells) for i in range(len(header))]
    widths = [max([len(h), *(len(row[i]) for row in cells)]) for i, h in enumerate(header)]
    lines = [header, *cells]
    return "\n".join(
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right)).rstrip() for line in lines
    )


_COLOURS = {
    "DONE": "green",
    "RUNNING": "cyan",
    "FAILED": "red",
    "LOST": "red",
    "STALE": "yellow",
    "INTERRUPTED": "yellow",
}


def show(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table: with rules and colours on a terminal, else as ``table`` makes it."""
    if not sys.stdout.isatty():
        print(table(header, rows), flush=True)
        return
    from rich.console import Console
    from rich.table import Table

    pretty = Table(box=None, header_style="bold")
    for name in header:
        pretty.add_column(name, overflow="fold")  # a cut run id would be of no use
    for row in rows:
        cells = [_text(c) for c in row]
        pretty.add_row(*cells, style=next((_COLOURS[c] for c in cells if c in _COLOURS), None))
    Console().print(pretty)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_number(text: str) -> bool:
    return text in ("-", "") or text.replace(".", "").replace("e+", "").replace("e-", "").rstrip("%kMGTBh").isdigit()


def count(value: float) -> str:
    """12800000 → 12.8M, three digits."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """90 → 1:30, 4000 → 1:06:40, 200000 → 2d07h."""
    if seconds is None:
        return "-"
    s = round(seconds)
    if s >= 86400:
        return f"{s // 86400}d{s % 86400 // 3600:02d}h"
    return f"{s // 3600}:{s % 3600 // 60:02d}:{s % 60:02d}" if s >= 3600 else f"{s // 60}:{s % 60:02d}"
