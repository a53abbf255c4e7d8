"""The page of ``clip-linear eval --html``: one file that needs no network, readable in the dark."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np

from clip_linear.files import write_text
from clip_linear_eval import metrics
from clip_linear_eval.datasets import DECODE_ERRORS
from clip_linear_eval.perclass import table_of
from clip_linear_eval.settings import Evaluation

_WORST, _MISTAKES, _PAIRS, _THUMB = 12, 6, 20, 96


def write_page(path: Path, evaluations: list[Evaluation]) -> None:
    """Write accuracies with intervals, reliability, the worst classes with thumbnails of their mistakes, and the most
    confused pairs."""
    import jinja2

    folder = Path(__file__).parent / "templates"
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(folder), autoescape=True)
    sections = [_section(evaluation) for evaluation in evaluations]
    text = environment.get_template("eval.html.j2").render(
        sections=sections, first=evaluations[0].rows[0], curve=_curve([row for e in evaluations for row in e.rows])
    )
    write_text(path, text)


def _section(evaluation: Evaluation) -> dict[str, Any]:
    row = evaluation.rows[0]
    section: dict[str, Any] = dict(row)
    section["model"] = " ".join(str(v) for v in (row.get("model"), row.get("pretrained")) if v)
    section["notes"] = evaluation.notes
    section["rows"] = [r | {"shown": _number(r, "value"), "interval": _interval(r)} for r in evaluation.rows]
    data, scores = evaluation.data, evaluation.scores
    if data is None or scores is None:
        return section
    first = scores.correct(data, 1)
    labels = data.labels[scores.index]
    predicted = np.where(first, labels, scores.top[:, 0])
    section["reliability"] = _reliability(metrics.reliability(scores.confidence, first))
    section["pairs"] = [
        {"true": data.names[a], "predicted": data.names[b], "count": count}
        for a, b, count in metrics.confused_pairs(labels, predicted, _PAIRS)
    ]
    section["worst"] = [_worst(evaluation, line) for line in _worst_lines(table_of(evaluation))]
    return section


def _worst_lines(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lowest recall first; among equals the larger class, of which more can be learned."""
    wrong = [line for line in table if line["correct"] < line["n"]]
    return sorted(wrong, key=lambda line: (line["recall"], -line["n"]))[:_WORST]


def _worst(evaluation: Evaluation, line: dict[str, Any]) -> dict[str, Any]:
    data, scores = evaluation.data, evaluation.scores
    assert data is not None and scores is not None, "only classification has classes"
    label = data.classes.index(line["class"])
    wrong = np.flatnonzero((data.labels[scores.index] == label) & ~scores.correct(data, 1))
    wrong = wrong[np.argsort(-scores.confidence[wrong], kind="stable")][:_MISTAKES]
    mistakes = [
        {
            "file": data.files[scores.index[j]],
            "image": _thumbnail(evaluation, int(scores.index[j])),
            "taken_for": data.names[scores.top[j, 0]],
            "confidence": float(scores.confidence[j]),
        }
        for j in wrong
    ]
    return line | {"mistakes": mistakes}


def _thumbnail(evaluation: Evaluation, index: int) -> str | None:
    """A small JPEG as a data address, or None where the file went away since it was scored."""
    from clip_linear_eval.features import decode

    assert evaluation.data is not None, "only classification has thumbnails"
    try:
        image = decode(evaluation.data.read(index), evaluation.data.border)
    except DECODE_ERRORS:
        return None
    image.thumbnail((_THUMB, _THUMB))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


def _number(row: dict[str, Any], column: str) -> str:
    value = row[column]
    if value is None:
        return "–"
    return f"{100 * value:.2f} %" if row["unit"] == "fraction" else f"{value:.3f}"


def _interval(row: dict[str, Any]) -> str:
    return f"{_number(row, 'ci_low')} – {_number(row, 'ci_high')}"


def _reliability(curve: metrics.Reliability) -> Any:
    """Accuracy per bin of confidence as bars against the diagonal; a dot's area is its share of the images."""
    size, left, top = 220, 34, 8
    parts = [
        f'<line class="axis" x1="{left}" y1="{top + size}" x2="{left + size}" y2="{top + size}"/>',
        f'<line class="axis" x1="{left}" y1="{top}" x2="{left}" y2="{top + size}"/>',
        f'<line class="ideal" x1="{left}" y1="{top + size}" x2="{left + size}" y2="{top}"/>',
        f'<text x="{left}" y="{top + size + 16}">0</text><text x="{left + size - 20}" y="{top + size + 16}">1</text>',
        f'<text x="{left + 70}" y="{top + size + 16}">confidence</text><text x="{left - 12}" y="{top + 10}">1</text>',
    ]
    width = size / metrics.BINS
    for b in np.flatnonzero(curve.n).tolist():
        height, x = size * float(curve.accuracy[b]), left + size * float(curve.confidence[b])
        y = top + size - height
        radius = 2 + 8 * (curve.n[b] / curve.n.sum()) ** 0.5
        title = f"{curve.n[b]} images, confidence {curve.confidence[b]:.3f}, accuracy {curve.accuracy[b]:.3f}"
        parts.append(
            f'<rect class="bar" x="{left + b * width:.1f}" y="{y:.1f}" width="{width - 1:.1f}" height="{height:.1f}"/>'
            f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"><title>{title}</title></circle>'
        )
    return _svg("".join(parts), left + size + 8, top + size + 22)


def _curve(rows: list[dict[str, Any]]) -> Any:
    """Top-1 over samples seen with intervals, one line per data set; None with fewer than two checkpoints."""
    lines: dict[str, list[tuple[int, float, float, float]]] = {}
    for row in rows:
        if row["metric"] == "top1" and row.get("samples_seen") is not None:
            point = (row["samples_seen"], row["value"], row["ci_low"], row["ci_high"])
            lines.setdefault(str(row["dataset"]), []).append(point)
    lines = {name: sorted(points) for name, points in lines.items() if len({p[0] for p in points}) > 1}
    if not lines:
        return None
    width, height, left = 460, 200, 50
    most_x = max(p[0] for points in lines.values() for p in points)
    most_y = max(p[3] for points in lines.values() for p in points)

    def place(x: float, y: float) -> str:
        return f"{left + width * x / most_x:.1f},{10 + height - height * y / most_y:.1f}"

    parts = [
        f'<line class="axis" x1="{left}" y1="{10 + height}" x2="{left + width}" y2="{10 + height}"/>',
        f'<text x="0" y="18">{100 * most_y:.1f} %</text><text x="{left}" y="{height + 26}">0</text>',
        f'<text x="{left + width - 90}" y="{height + 26}">{most_x:,} samples</text>',
    ]
    for name, points in lines.items():
        parts.append(f'<polyline class="curve" points="{" ".join(place(x, y) for x, y, _, _ in points)}"/>')
        for x, y, low, high in points:
            cx, cy = place(x, y).split(",")
            _, y1 = place(x, low).split(",")
            _, y2 = place(x, high).split(",")
            title = f"{_escape(name)}: {x:,} samples, {100 * y:.2f} % ({100 * low:.2f} – {100 * high:.2f})"
            parts.append(
                f'<line class="range" x1="{cx}" y1="{y1}" x2="{cx}" y2="{y2}"/>'
                f'<circle class="dot" cx="{cx}" cy="{cy}" r="4"><title>{title}</title></circle>'
            )
        end = place(*points[-1][:2]).split(",")
        parts.append(f'<text x="{float(end[0]) + 8}" y="{end[1]}">{_escape(name)}</text>')
    return _svg("".join(parts), left + width + 170, height + 34)


def _escape(text: str) -> str:
    from markupsafe import escape

    return str(escape(text))


def _svg(content: str, width: int, height: int) -> Any:
    from markupsafe import Markup

    return Markup(f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">{content}</svg>')
