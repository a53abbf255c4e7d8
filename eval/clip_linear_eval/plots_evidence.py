"""Figures that test a law: local slopes, held-out sizes, frontiers over cost, isoFLOP curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from clip_linear_eval import frontier
from clip_linear_eval.laws import Points
from clip_linear_eval.laws_fitted import Law
from clip_linear_eval.plots import MUTED, Style, figure, log_axis, to_svg
from clip_linear_eval.plots_laws import y_text
from clip_linear_eval.report_words import AXIS, number


def slope_figure(
    points: Mapping[str, Points], laws: Mapping[str, Law], style: Mapping[str, Style], *, x: str
) -> str | None:
    """The exponent between neighbouring sizes beside the law's: a trend here means that one power law does not do."""
    with figure(height=3.4) as (made, axes):
        drawn, values, spans = False, [], []
        for name, law in laws.items():
            at, y = _means(points[name])
            if len(at) < 2:
                continue
            look = style[name]
            slopes = -np.diff(np.log(y)) / np.diff(np.log(at))
            middle = np.sqrt(at[1:] * at[:-1])
            axes.plot(middle, slopes, ls="", marker=look.marker, color=look.color, mec="none", label=name)
            grid = np.geomspace(at[0], at[-1], 60)
            axes.plot(grid, law.local_slope(grid), ls=look.dash, color=look.color, lw=1.2)
            values += list(slopes)
            spans += [at[0], at[-1]]
            drawn = True
        if not drawn:
            return None
        axes.axhline(0, color=MUTED, lw=1)
        log_axis(axes, "x", min(spans) / 1.06, max(spans) * 1.06, number)
        axes.set_xlabel(AXIS.get(x, x))
        axes.set_ylabel("local exponent")
        axes.set_title("Local slope (points: between neighbouring sizes)")
        return to_svg(made)


def _means(points: Points) -> tuple[np.ndarray, np.ndarray]:
    """Geometric mean of y at each distinct x."""
    at = np.unique(points.x)
    return at, np.array([np.exp(np.log(points.y[points.x == v]).mean()) for v in at])


def hold_out_figure(held: Mapping[str, dict[str, Any]], style: Mapping[str, Style], *, fraction: bool) -> str | None:
    """The largest sizes, predicted from the smaller ones: prediction with its 95 % interval, and what was measured."""
    entries = [(name, p) for name, told in held.items() for p in told["points"]]
    if not entries:
        return None
    text = y_text(fraction)
    with figure(height=1.3 + 0.3 * len(entries)) as (made, axes):
        values = [v for _, p in entries for v in (p["y"], p["measured"])]
        low, high = min(values), max(values)
        reach = (high / low) ** 1.5 * 1.05
        low, high = low / reach, high * reach
        for i, (name, p) in enumerate(entries):
            look = style[name]
            if p["pi95"] is not None:
                lo, hi = max(p["pi95"][0], low), min(p["pi95"][1], high)
                axes.plot([lo, hi], [i, i], color=look.color, lw=1.6)
            axes.plot([p["y"]], [i], marker="|", ms=11, color=look.color)
            axes.plot([p["measured"]], [i], marker=look.marker, color=look.color, mec="none")
        log_axis(axes, "x", low, high, text)
        axes.set_ylim(len(entries) - 0.5, -0.5)
        axes.set_yticks(range(len(entries)), [f"{name} · {number(p['x'])}" for name, p in entries])
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("predicted (bar and 95 % interval) and measured (marker)")
        axes.set_title("Largest size predicted from the rest")
        return to_svg(made)


def frontier_figure(
    points: Mapping[str, Points], style: Mapping[str, Style], *, x: str, y: str, fraction: bool
) -> str | None:
    """All runs over a cost, and the steps of the best ones: at this budget, the lowest error that was reached."""
    if len(np.unique([v for p in points.values() for v in p.x])) < 2:
        return None
    with figure() as (made, axes):
        for name, all_runs in points.items():
            look, best = style[name], frontier.pareto(all_runs)
            axes.plot(all_runs.x, all_runs.y, ls="", marker=look.marker, color=look.color, mec="none", alpha=0.45)
            steps_x = np.append(np.repeat(best.x, 2)[1:], all_runs.x.max())
            axes.plot(steps_x, np.repeat(best.y, 2), ls=look.dash, color=look.color, label=name)
        xs, ys = (np.concatenate([getattr(p, c) for p in points.values()]) for c in ("x", "y"))
        pad = (ys.max() / ys.min()) ** 0.06 if ys.max() > ys.min() else 1.2
        log_axis(axes, "x", xs.min() / 1.15, xs.max() * 1.15, number)
        log_axis(axes, "y", ys.min() / pad, ys.max() * pad, y_text(fraction))
        axes.set_xlabel(AXIS.get(x, x))
        axes.set_ylabel(y)
        axes.set_title(f"Frontier over {AXIS.get(x, x)}")
        axes.legend(loc="best")
        return to_svg(made)


def isoflop_figure(
    points: Points, told: dict[str, Any], style: Style, *, name: str, x: str, y: str, fraction: bool
) -> str:
    """y against size at each budget with its parabola; a budget without a minimum inside has no diamond."""
    assert points.x2 is not None
    with figure() as (made, axes):
        for k, vertex in enumerate([*told["points"], *told["rejected"]]):
            mine = points.take(np.abs(np.log(points.x2 / vertex["budget"])) < 0.2)
            order = np.argsort(mine.x)
            shade = 0.35 + 0.65 * (k + 1) / (len(told["points"]) + len(told["rejected"]))
            axes.plot(
                mine.x[order], mine.y[order], ls="", marker="o", ms=3.5, color=style.color, alpha=shade, mec="none"
            )
            if mine.n >= 3 and len(np.unique(mine.x)) >= 3:
                u = np.log(mine.x)
                curve = np.polyfit(u - u.mean(), mine.y, 2)
                grid = np.linspace(u.min(), u.max(), 60)
                axes.plot(np.exp(grid), np.polyval(curve, grid - u.mean()), color=style.color, lw=1.0, alpha=shade)
            if vertex["n_opt"] is not None:
                axes.plot([vertex["n_opt"]], [vertex["y_opt"]], marker="D", color=style.color, mec="none")
        log_axis(axes, "x", points.x.min() / 1.15, points.x.max() * 1.15, number)
        log_axis(axes, "y", points.y.min() / 1.03, points.y.max() * 1.03, y_text(fraction))
        axes.set_xlabel(AXIS.get(x, x))
        axes.set_ylabel(y)
        axes.set_title(f"IsoFLOP curves, {name}")
        return to_svg(made)
