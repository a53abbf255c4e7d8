"""How figures look: a palette for the colour-blind, text as text, and SVG that a page inlines in light and dark."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, darkened where it is weak on white; the second column is for a dark page. Colour is never the
# only sign: each style also has its own marker and dashes.
PALETTE = (
    ("#0072b2", "#56b4e9"),
    ("#c25000", "#ff9d4d"),
    ("#007a5a", "#2fc79a"),
    ("#a8447c", "#e48fbf"),
    ("#8a6d00", "#e6c229"),
    ("#4b4bb8", "#a3a3ff"),
    ("#5c5c5c", "#b8b8b8"),
    ("#1f8a8a", "#5fd3d3"),
)
MARKERS = "osD^vP*X"
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (3, 1.5)), (0, (8, 2, 1, 2, 1, 2)))
INK, MUTED, GRID, PAPER = "#1b1f24", "#5a626c", "#d9dde2", "#fefefe"
_PAGE = {INK: "--ink", MUTED: "--muted", GRID: "--line", PAPER: "--paper"} | {
    light: f"--c{i}" for i, (light, _) in enumerate(PALETTE)
}
_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class Style:
    """Colour, marker and dashes of one group in every figure of a report."""

    color: str
    marker: str
    dash: Any


def styles(names: Sequence[str]) -> dict[str, Style]:
    """A style per group, in order; softmax, where it is there, comes first and so always looks the same."""
    order = sorted(names, key=lambda n: (n != "softmax", list(names).index(n)))
    return {
        name: Style(PALETTE[i % len(PALETTE)][0], MARKERS[i % len(MARKERS)], DASHES[i % len(DASHES)])
        for i, name in enumerate(order)
    }


@contextlib.contextmanager
def figure(width: float = 5.4, height: float = 3.9, **grid: Any) -> Iterator[tuple[Figure, Any]]:
    """A figure and its axes under our style, closed afterwards; never touches a display or the user's settings."""
    import matplotlib

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "clip_linear",
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": MUTED,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": GRID,
        "grid.linewidth": 0.6,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "lines.linewidth": 1.6,
        "lines.markersize": 5.5,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
    }
    with matplotlib.rc_context(settings):
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        made = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(made)
        yield made, made.subplots(**grid)


def to_svg(made: Figure) -> str:
    """The figure as an SVG element without prolog, date or creator: the same figure gives the same bytes."""
    out = io.StringIO()
    made.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.S)
    return text.replace("'DejaVu Sans'", _FONT).strip()


def inline(svg: str, name: str, label: str) -> str:
    """An SVG for inlining: ids of its own, colours as the page's variables, a label for screen readers."""
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    for color, variable in _PAGE.items():
        svg = re.sub(color, f"var({variable})", svg, flags=re.I)
    svg = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{_attribute(label)}" ', 1)


def standalone(svg: str) -> str:
    """An SVG file for a README: plain colours on a light ground, readable wherever it is shown."""
    head, rest = svg.split(">", 1)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head}>\n<rect width="100%" height="100%" fill="#ffffff"/>{rest}\n'


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def ticks(low: float, high: float, most: int = 6) -> np.ndarray:
    """Round positions for a log axis: whole decades or 1-2-5 steps where they are enough, else finer round numbers."""
    from matplotlib.ticker import MaxNLocator

    for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        at = np.array([m * 10.0**e for e in range(-15, 25) for m in steps])
        at = at[(at >= low * 0.999) & (at <= high * 1.001)]
        if len(at) > most:
            return at[:: -(-len(at) // most)]
        if len(at) >= 3:
            return at
    at = np.asarray(MaxNLocator(most).tick_values(low, high))
    return at[(at >= low * 0.999) & (at <= high * 1.001)]


def log_axis(axes: Axes, which: str, low: float, high: float, text: Callable[[float], str]) -> None:
    """Make one axis logarithmic over [low, high] with round, readable ticks."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)
    at = ticks(low, high)
    axis.set_ticks(list(at), labels=[text(v) for v in at])
    axis.set_ticks([], minor=True)
