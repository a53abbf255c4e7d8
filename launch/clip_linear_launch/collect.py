"""The rows of all finished runs of a sweep in one table."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from clip_linear.files import read_jsonl
from clip_linear_launch import rundir
from clip_linear_launch.status import sweep_runs

ROWS, ALL_ROWS = "rows.csv", "rows_all.csv"
_TAIL = 0.1  # the share of the logged steps whose mean loss says which alternative of a tuned cell is best


def collect(sweep_folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows that count, all rows) of the finished runs, written to rows.csv (and rows_all.csv if they differ).

    Where [per_model] gave alternatives (several learning rates), the one with the lowest final *training* loss counts:
    choosing by the evaluation would use the test set twice.
    """
    from clip_linear_eval.results import write_rows

    name = str(rundir.read(sweep_folder / "sweep.json").get("name") or sweep_folder.name)
    rows: list[dict[str, Any]] = []
    candidates: dict[str, list[tuple[float, str]]] = {}
    for run_id in sweep_runs(sweep_folder):
        folder = rundir.folder(sweep_folder, run_id)
        if not (folder / rundir.DONE).exists():
            continue
        run = rundir.read(folder / rundir.RUN)
        rows += run_rows(folder, run, name)
        candidates.setdefault(str(run.get("cell")), []).append((final_loss(folder), run_id))
    best = {min(tried)[1] for tried in candidates.values()}
    counting = [row for row in rows if row["run_id"] in best]
    write_rows(sweep_folder / ROWS, counting)
    if len(counting) < len(rows):
        write_rows(sweep_folder / ALL_ROWS, rows)
    return counting, rows


def run_rows(folder: Path, run: dict[str, Any], study: str) -> list[dict[str, Any]]:
    """The rows that a run's evaluation measured, and its final training loss.

    Beyond the schema they have the columns of LAION's scaling-law tables: arch, data, epochs, samples_per_epoch, lr,
    warmup, global_batch_size, local_bs, gpus, samples_per_sec.
    """
    from clip_linear_eval.results import make_row

    found = _eval_rows(folder / "eval.json")
    planned = _conditions(run) | {"provenance": "measured"}
    mine = {"study": study, "run_id": run["run_id"]} | _laion(folder, run)
    rows = [make_row(**(planned | {k: v for k, v in row.items() if v is not None} | mine)) for row in found]
    loss = final_loss(folder)
    if math.isfinite(loss):
        told = {k: found[0].get(k) for k in ("device", "versions", "commit", "date")} if found else {}
        value = {"dataset": "train", "metric": "loss", "value": loss, "unit": "nats"}
        rows.append(make_row(**(planned | told | value | mine)))
    return rows


def _eval_rows(path: Path) -> list[dict[str, Any]]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return []
    return list(value.get("rows", []) if isinstance(value, dict) else value)


def _conditions(run: dict[str, Any]) -> dict[str, Any]:
    size, samples = run.get("size", {}), run.get("samples", 0)
    keys = ("n_params_vision", "n_params_text", "n_params_embedding", "n_params_total", "gmacs")
    known = {k: size.get(k) for k in keys} | {k: run.get(k) for k in ("model", "image_variant", "text_variant", "seed")}
    return known | {"samples_seen": samples, "gmacs_total": (size.get("gmacs") or 0.0) * samples}


def final_loss(folder: Path) -> float:
    """Mean training loss over the last tenth of the logged steps; infinite when there is none (or it diverged)."""
    losses = [row["loss"] for row in read_jsonl(folder / "metrics.jsonl") if "loss" in row]
    tail = losses[-max(1, math.ceil(len(losses) * _TAIL)) :] if losses else []
    return math.inf if not tail or None in tail else sum(tail) / len(tail)


def _laion(folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    argv = run.get("argv", [])

    def flag(name: str) -> str | None:
        return argv[argv.index(f"--{name}") + 1] if f"--{name}" in argv[:-1] else None

    resources = run.get("resources", {})
    gpus = int(resources.get("nodes", 1)) * int(resources.get("gpus_per_node", 0))
    beat = rundir.read(folder / rundir.STATE)
    epochs = int(flag("epochs") or 1)
    hours = rundir.device_hours(rundir.attempts(folder), max(1, gpus), beat.get("t"), live=False)
    return {
        "arch": str(run.get("model", "")).split("+")[0],
        "data": flag("train-data"),
        "epochs": epochs,
        "samples_per_epoch": int(run.get("samples", 0)) // epochs,
        "lr": flag("lr"),
        "warmup": flag("warmup"),
        "global_batch_size": run.get("global_batch"),
        "local_bs": flag("batch-size"),
        "gpus": gpus,
        "device_hours": hours,
        "samples_per_sec": beat.get("samples_per_s"),
        "tuning": json.dumps(run["tuning"]) if run.get("tuning") else None,
    }
