"""Figures of laws: points with laws and bands, residuals, size multipliers, exponents side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clip_linear_eval.laws import Points
from clip_linear_eval.laws_fitted import Law
from clip_linear_eval.laws_published import Published
from clip_linear_eval.plots import DASHES, GRID, MUTED, Style, figure, log_axis, to_svg
from clip_linear_eval.report_words import AXIS, number

_BEYOND = 2.0  # how far a law is drawn beyond its data, as a factor of x


def percent(v: float) -> str:
    return f"{100 * v:.3g} %"


def y_text(fraction: bool) -> Any:
    return percent if fraction else (lambda v: f"{v:.3g}")


def law_figure(
    points: Mapping[str, Points],
    laws: Mapping[str, Law],
    style: Mapping[str, Style],
    *,
    x: str,
    y: str,
    fraction: bool,
    title: str = "",
    synthetic: bool = False,
    published: Sequence[Published] = (),
) -> str:
    """Error (or loss) against size, log–log: points, laws (dashed beyond the data) and their 95 % bands."""
    with figure() as (made, axes):
        all_y = np.concatenate([p.y for p in points.values()])
        all_x = np.concatenate([p.x for p in points.values()])
        low, high = all_y.min(), all_y.max()
        for name, at in points.items():
            look = style[name]
            if name in laws:
                low, high = _draw_law(axes, laws[name], look, low, high)
            axes.plot(at.x, at.y, ls="", marker=look.marker, color=look.color, mec="none", alpha=0.9, zorder=3)
            axes.plot([], [], ls=look.dash, marker=look.marker, color=look.color, mec="none", label=name)
        pad_x = (all_x.max() / all_x.min()) ** 0.06 if all_x.max() > all_x.min() else 1.5
        pad_y = (high / low) ** 0.06 if high > low else 1.2
        log_axis(axes, "x", all_x.min() / pad_x, all_x.max() * pad_x, number)
        log_axis(axes, "y", low / pad_y, high * pad_y, y_text(fraction))
        for k, other in enumerate(published):
            _draw_published(axes, other, k)
        axes.set_xlabel(AXIS.get(x, x))
        axes.set_ylabel(y)
        axes.set_title(("synthetic data · " if synthetic else "") + title)
        axes.legend(ncols=2 if len(points) > 4 else 1, loc="best")
        return to_svg(made)


def _draw_published(axes: Any, law: Published, k: int) -> None:
    """A published law where its own range meets the frame; the frame stays."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    grid = np.geomspace(max(left, law.our_range[0]), max(min(right, law.our_range[1]), left), 60)
    y = law.predict(grid)
    if law.our_range[0] < right and law.our_range[1] > left and ((low < y) & (y < high)).any():
        axes.plot(grid, y, color=MUTED, lw=1.1, ls=DASHES[1 + k % (len(DASHES) - 1)], label=f"{law.name} (published)")


def _draw_law(axes: Any, law: Law, look: Style, low: float, high: float) -> tuple[float, float]:
    first, last = law.x_range
    inside = np.geomspace(first, last, 80)
    for grid, dash in (
        (np.geomspace(first / _BEYOND, first, 20), True),
        (np.geomspace(last, last * _BEYOND, 20), True),
    ):
        axes.plot(grid, law.predict(grid), ls=(0, (2, 2)), lw=1.0, color=look.color, alpha=0.6 if dash else 1)
    axes.plot(inside, law.predict(inside), ls=look.dash, color=look.color)
    band = law.band(inside)
    if band is None:
        return low, high
    axes.fill_between(inside, *band, color=look.color, alpha=0.16, lw=0)
    span = np.log(high / low) if high > low else 0.5  # a very wide band must not squeeze the points
    return max(min(low, band[0].min()), low * np.exp(-span)), min(max(high, band[1].max()), high * np.exp(span))


def residual_figure(
    points: Mapping[str, Points], laws: Mapping[str, Law], style: Mapping[str, Style], *, x: str
) -> str:
    """Deviation of each point from its law, in percent: curvature here means that the form is wrong."""
    with figure(height=3.0) as (made, axes):
        axes.axhline(0, color=MUTED, lw=1)
        for name, law in laws.items():
            at = points[name]
            off = 100 * np.log(at.y / law.predict(at.x, at.x2))
            axes.plot(at.x, off, ls="", marker=style[name].marker, color=style[name].color, mec="none", label=name)
        all_x = np.concatenate([points[name].x for name in laws])
        pad = (all_x.max() / all_x.min()) ** 0.06
        log_axis(axes, "x", all_x.min() / pad, all_x.max() * pad, number)
        axes.set_xlabel(AXIS.get(x, x))
        axes.set_ylabel("measured / law − 1, %")
        axes.set_title("Residuals")
        return to_svg(made)


def multiplier_figure(comparisons: Sequence[dict[str, Any]], style: Mapping[str, Style], *, x: str) -> str | None:
    """How many times the reference's size each variant needs for the same error, inside the common data."""
    drawn = [c for c in comparisons if any(p["ratio"] is not None for p in c["size_multiplier"]["curve"])]
    if not drawn:
        return None
    with figure() as (made, axes):
        axes.axhline(1, color=style[drawn[0]["ref"]].color, lw=1.6, label=drawn[0]["ref"])
        values = [1.0]
        for c in drawn:
            look = style[c["group"]]
            curve = [p for p in c["size_multiplier"]["curve"] if p["ratio"] is not None]
            at = [p["x"] for p in curve]
            axes.plot(at, [p["ratio"] for p in curve], ls=look.dash, color=look.color, label=c["group"])
            values += [p["ratio"] for p in curve]
            banded = [p for p in curve if p["ci95"] is not None and None not in p["ci95"]]
            if banded:
                ends = np.array([p["ci95"] for p in banded], dtype=float)
                axes.fill_between([p["x"] for p in banded], ends[:, 0], ends[:, 1], color=look.color, alpha=0.16, lw=0)
                values += list(ends.ravel())
        low, high = max(min(values), min(1.0, min(v for v in values)), 1 / 16), min(max(values), 16)
        xs = [p["x"] for c in drawn for p in c["size_multiplier"]["curve"]]
        pad = 1.08 if min(xs) < max(xs) else 1.5
        log_axis(axes, "x", min(xs) / pad, max(xs) * pad, number)
        log_axis(axes, "y", low / 1.08, high * 1.08, lambda v: f"{v:.3g}×")
        axes.set_xlabel(f"{AXIS.get(x, x)} of {drawn[0]['ref']}")
        axes.set_ylabel("size for the same error")
        axes.set_title(f"Multiplier against {drawn[0]['ref']}")
        axes.legend(loc="best")
        return to_svg(made)


def forest_figure(
    entries: Sequence[tuple[str, str, float, tuple[float | None, float | None] | None]], style: Mapping[str, Style]
) -> str:
    """Exponents with 95 % intervals, one line each: (label, group, α, interval)."""
    with figure(height=1.1 + 0.26 * len(entries)) as (made, axes):
        span = [a for _, _, a, ci in entries for a in (a, *(v for v in ci or () if v is not None))]
        low, high = min(span), max(span)
        center = sorted(a for _, _, a, _ in entries)[len(entries) // 2]
        reach = 4 * max(np.ptp([a for _, _, a, _ in entries]), abs(center) * 0.5, 1e-3)
        low, high = max(low, center - reach), min(high, center + reach)
        pad = 0.05 * (high - low) or 0.05
        for i, (_, group, alpha, ci) in enumerate(entries):
            look = style[group]
            if ci is not None:
                ends = [low - pad if ci[0] is None else ci[0], high + pad if ci[1] is None else ci[1]]
                axes.plot(ends, [i, i], color=look.color, lw=1.6)
            axes.plot([alpha], [i], marker=look.marker, color=look.color, mec="none")
        if low - pad < 0 < high + pad:
            axes.axvline(0, color=MUTED, lw=1)
        axes.set_xlim(low - pad, high + pad)
        axes.set_ylim(len(entries) - 0.5, -0.5)
        axes.set_yticks(range(len(entries)), [label for label, *_ in entries])
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", color=GRID)
        axes.set_xlabel("exponent α (95 % interval)")
        axes.set_title("Exponents")
        return to_svg(made)
