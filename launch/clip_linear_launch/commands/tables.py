"""Tables for a terminal or a pipe: plain text, as wide as its cells."""

from __future__ import annotations

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
