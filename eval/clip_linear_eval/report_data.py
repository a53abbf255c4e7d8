"""What a report is made of: rows, fits of them, and the runs' folders."""

from __future__ import annotations

import json
import math
import statistics
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clip_linear.errors import UserError
from clip_linear.files import read_jsonl
from clip_linear_eval.fit import Options
from clip_linear_eval.fit_input import Columns, is_accuracy, select
from clip_linear_eval.fit_screen import FitRefused
from clip_linear_eval.fit_table import fit_table
from clip_linear_eval.laws import Points
from clip_linear_eval.laws_fitted import Law

_SIZES = ("n_params_vision", "n_params_total", "gmacs_total", "samples_seen")
_ERRORS = ("top1", "top5", "mean_per_class_recall")


@dataclass(frozen=True)
class Run:
    """One run's folder, as far as it can be read."""

    run_id: str
    variant: str
    size: float | None
    state: str  # done, failed, cancelled or running
    losses: list[tuple[float, float]] = field(repr=False)  # (samples_seen, loss)
    samples_per_s: float | None
    data_wait_frac: float | None
    device: str
    env: dict[str, Any] = field(repr=False)
    config: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Fitted:
    """The fit of one dataset and metric: fit.json's content, its laws and points; or why there is none."""

    columns: Columns
    title: str
    json: dict[str, Any] | None
    laws: dict[str, Law]
    points: dict[str, Points]
    synthetic: bool
    refused: str = ""

    @property
    def metric(self) -> str:
        return self._chosen("metric")

    @property
    def dataset(self) -> str:
        return self._chosen("dataset")

    def _chosen(self, column: str) -> str:
        return dict(text.split("=", 1) for text in self.columns.where if "=" in text).get(column, "")

    @property
    def is_fraction(self) -> bool:
        """Whether y is an error as a fraction, to be shown in percent."""
        unit = self.json["conventions"]["unit"] if self.json else self.columns.unit or ""
        return unit.startswith(("fraction", "percent"))

    @property
    def y_name(self) -> str:
        return "error" if self.is_fraction else self.columns.y if self.columns.y != "value" else self.metric or "value"


def rows_path(source: Path) -> Path:
    """The file of rows: a folder's rows.csv, or the file itself. Raises UserError if a folder has none."""
    if source.is_dir() and not (source / "rows.csv").is_file():
        raise UserError(f"{str(source)!r} holds no rows.csv; run: clip-linear launch collect, or give a file of rows")
    return source / "rows.csv" if source.is_dir() else source


def read_fit(path: Path) -> dict[str, Any]:
    """A fit.json. Raises UserError if it is not one."""
    try:
        fit = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{str(path)!r} cannot be read; give the fit.json that clip-linear fit wrote") from None
    except ValueError:
        raise UserError(f"{str(path)!r} is not JSON; give the fit.json that clip-linear fit wrote") from None
    if not isinstance(fit, dict) or not str(fit.get("schema", "")).startswith("clip_linear.fit/"):
        raise UserError(f"{str(path)!r} is not a fit.json of clip-linear fit")
    return fit


def from_fit(table: Any, fit: dict[str, Any]) -> Fitted:
    """The fit as it was written, with its points taken from the rows again. Raises UserError if they do not fit it."""
    columns = Columns(**{**fit["columns"], "where": tuple(fit["columns"]["where"])})
    points = points_of(table, columns)
    if missing := set(fit["groups"]) - set(points):
        raise UserError(f"the rows hold no {', '.join(sorted(missing))}, which fit.json fitted; fit these rows again")
    laws = {} if fit["form"] == "isoflop" else {n: Law.from_json(g, points[n]) for n, g in fit["groups"].items()}
    return Fitted(columns, title_of(columns, table), fit, laws, points, bool(fit.get("synthetic")))


def points_of(table: Any, columns: Columns) -> dict[str, Points]:
    """The usable points of each group, percent as fractions. Raises FitRefused as ``select`` does."""
    chosen = select(table, columns)
    points = {}
    for group in chosen.groups:
        y = group.y / 100 if chosen.unit == "percent" else group.y
        keep = [i for i in range(len(y)) if _usable(group.x[i]) and _usable(y[i])]
        if keep:
            points[group.name] = Points.of(group.x[keep], y[keep], None if group.x2 is None else group.x2[keep])
    return points


def _usable(v: float) -> bool:
    return math.isfinite(v) and v > 0


def title_of(columns: Columns, table: Any) -> str:
    """``top1 on twemoji_flags``, from the --where conditions, else from the columns."""
    chosen = dict(text.split("=", 1) for text in columns.where if "=" in text)
    parts = [chosen.get(k) or _only(table, k) for k in ("metric", "dataset")]
    return " on ".join(p for p in parts if p) if parts[0] else columns.y


def _only(table: Any, column: str) -> str:
    values = table[column].dropna().astype(str).unique() if column in table.columns else []
    return str(values[0]) if len(values) == 1 else ""


def fit_everything(table: Any, like: dict[str, Any] | None) -> Iterator[Fitted]:
    """A law for every dataset and metric (accuracies, loss) in the rows, in the manner of ``like`` if given."""
    if not {"metric", "value", "dataset"} <= set(table.columns) or (like or {}).get("form") in (
        "chinchilla",
        "isoflop",
    ):
        return
    settings = like or {}
    options = Options(form=settings.get("form", "power"), objective=settings.get("objective", "gaussian"))
    x = settings.get("x") or _size_column(table)
    group = settings["group"] if like else ("image_variant" if "image_variant" in table.columns else None)
    if x is None:
        return
    pairs = table[["metric", "dataset"]].dropna().drop_duplicates().astype(str).values.tolist()
    order = {m: i for i, m in enumerate((*_ERRORS, "loss"))}
    for metric, dataset in sorted(pairs, key=lambda p: order.get(p[0], len(order))):
        if metric != "loss" and not is_accuracy(metric):
            continue
        where = (f"metric={metric}", f"dataset={dataset}")
        columns = Columns(x=x, y="value" if metric == "loss" else "error", group=group, where=where)
        title = title_of(columns, table)
        try:
            fits = fit_table(table, columns, options, settings.get("ref"))
        except FitRefused as refusal:
            yield Fitted(columns, title, None, {}, _points_or_none(table, columns), False, str(refusal))
        except UserError:  # the reference is missing for this dataset: nothing to compare here
            continue
        else:
            points = {name: law.points for name, law in fits.laws.items()}
            yield Fitted(columns, title, fits.json, fits.laws, points, fits.json["synthetic"])


def _points_or_none(table: Any, columns: Columns) -> dict[str, Points]:
    try:
        return points_of(table, columns)
    except FitRefused:
        return {}


def _size_column(table: Any) -> str | None:
    """The first size column that varies, else the first there is."""
    there = [c for c in _SIZES if c in table.columns and table[c].notna().any()]
    varying = [c for c in there if table[c].nunique() > 1]
    return next(iter(varying or there), None)


def read_runs(folder: Path, table: Any) -> list[Run]:
    """The run folders under ``folder``/runs, named and sized by their rows where these are."""
    about: dict[str, dict[str, Any]] = {}
    if "run_id" in table.columns:
        for row in table.drop_duplicates("run_id").to_dict("records"):
            about[str(row["run_id"])] = row
    runs = []
    for path in sorted((folder / "runs").glob("*")) if (folder / "runs").is_dir() else []:
        if not path.is_dir() or not any((path / f).is_file() for f in ("config.toml", "metrics.jsonl")):
            continue
        row = about.get(path.name, {})
        metrics = read_jsonl(path / "metrics.jsonl")
        config, env = _toml(path / "config.toml"), _json(path / "env.json")
        size = row.get("n_params_vision")
        runs.append(
            Run(
                run_id=path.name,
                variant=str(row.get("image_variant") or _variant(str(config.get("model", path.name)))),
                size=float(size) if size is not None and math.isfinite(float(size)) else None,
                state=next((s for s in ("done", "failed", "cancelled") if (path / f"{s}.json").is_file()), "running"),
                losses=[
                    (m["samples_seen"], m["loss"]) for m in metrics if _number(m.get("loss")) and "samples_seen" in m
                ],
                samples_per_s=_median([m.get("samples_per_s") for m in metrics[1:] or metrics]),
                data_wait_frac=_median([m.get("data_wait_frac") for m in metrics[1:] or metrics]),
                device=str(row.get("device") or env.get("cpu") or ""),
                env=env,
                config=config,
            )
        )
    return runs


def _variant(model: str) -> str:
    parts = model.split("+")
    return parts[1] if len(parts) > 1 else "softmax"


def _number(v: Any) -> bool:
    return isinstance(v, int | float) and math.isfinite(v)


def _median(values: list[Any]) -> float | None:
    known = [float(v) for v in values if _number(v)]
    return statistics.median(known) if known else None


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
