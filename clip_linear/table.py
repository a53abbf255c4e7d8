"""Plain tables for terminals and Markdown."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def render(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns padded to their widest cell; numbers are set right. Ends with a newline."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max([_width(h), *(_width(row[i]) for row in cells)]) for i, h in enumerate(headers)]
    right = [all(isinstance(row[i], int | float) for row in rows) and bool(rows) for i in range(len(headers))]
    lines = [list(headers), *cells]
    return "".join("  ".join(_pad(c, w, r) for c, w, r in zip(line, widths, right)).rstrip() + "\n" for line in lines)


def _width(text: str) -> int:
    # Combining marks (q̂) take no column of their own.
    return sum(not unicodedata.combining(c) for c in text)


def _pad(text: str, width: int, right: bool) -> str:
    space = " " * (width - _width(text))
    return space + text if right else text + space


def markdown(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The same table in Markdown."""
    lines = [list(headers), ["---"] * len(headers), *([str(c).replace("|", "\\|") for c in row] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
