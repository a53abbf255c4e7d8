"""Figures of runs: loss against samples seen, and throughput against size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from clip_linear_eval.plots import Style, figure, log_axis, to_svg
from clip_linear_eval.report_words import number

if TYPE_CHECKING:
    from clip_linear_eval.report_data import Run

_MOST = 400  # points drawn of one curve


def loss_figure(runs: Sequence[Run], style: Mapping[str, Style]) -> str | None:
    """Training loss, one thin line a run, smoothed over a twentieth of its length; wider lines are larger models."""
    drawn = [r for r in runs if len(r.losses) > 1]
    if not drawn:
        return None
    sizes = sorted({r.size or 0.0 for r in drawn})
    with figure(width=5.4, height=3.9) as (made, axes):
        for run in drawn:
            at, loss = _smoothed(run.losses)
            rank = sizes.index(run.size or 0.0) / max(1, len(sizes) - 1)
            look = style[run.variant]
            axes.plot(at, loss, color=look.color, ls=look.dash, lw=0.7 + 1.3 * rank, alpha=0.85)
        for name in _variants(drawn, style):
            axes.plot([], [], color=style[name].color, ls=style[name].dash, label=name)
        axes.set_xlabel("samples seen")
        axes.set_ylabel("contrastive loss, nats")
        axes.xaxis.set_major_formatter(lambda v, _: number(v))
        axes.set_title("Training loss (wider: larger model)")
        axes.legend(loc="best")
        return to_svg(made)


def _variants(runs: Sequence[Run], style: Mapping[str, Style]) -> list[str]:
    return [name for name in style if any(r.variant == name for r in runs)]


def _smoothed(points: Sequence[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    at, loss = np.array(points, dtype=float).T
    width = max(1, len(loss) // 20)
    sums = np.cumsum(np.r_[0.0, loss])
    mean = (sums[width:] - sums[:-width]) / width
    at = at[width - 1 :]
    keep = np.unique(np.linspace(0, len(at) - 1, min(_MOST, len(at))).astype(int))
    return at[keep], mean[keep]


def throughput_figure(runs: Sequence[Run], style: Mapping[str, Style]) -> str | None:
    """Median training throughput of each run against the size of its image tower."""
    drawn = [r for r in runs if r.samples_per_s and r.size]
    if not drawn:
        return None
    with figure() as (made, axes):
        for name in _variants(drawn, style):
            mine = sorted((r for r in drawn if r.variant == name), key=lambda r: r.size or 0)
            axes.plot(
                [r.size for r in mine],
                [r.samples_per_s for r in mine],
                color=style[name].color,
                ls=style[name].dash,
                lw=1.0,
                marker=style[name].marker,
                mec="none",
                label=name,
            )
        xs = [r.size for r in drawn if r.size]
        ys = [r.samples_per_s for r in drawn if r.samples_per_s]
        log_axis(axes, "x", min(xs) / 1.15, max(xs) * 1.15, number)
        log_axis(axes, "y", min(ys) / 1.15, max(ys) * 1.15, number)
        axes.set_xlabel("parameters of the vision tower")
        axes.set_ylabel("training samples per second")
        axes.set_title("Throughput")
        axes.legend(loc="best")
        return to_svg(made)
