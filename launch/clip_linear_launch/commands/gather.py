"""``launch collect`` and ``launch report``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from clip_linear.errors import UserError
from clip_linear_launch import collect as collecting
from clip_linear_launch.status import statuses
from clip_linear_launch.sweep import load


def collect(args: argparse.Namespace) -> int:
    """Write rows.csv of the finished runs."""
    folder = load(args.sweep, args.root).folder
    counting, rows = collecting.collect(folder)
    if args.json:
        print(json.dumps(counting, indent=1))
        return 0
    open_runs = [s for s in statuses(folder) if s.state != "DONE"]
    print(f"{len(counting)} rows in {folder / collecting.ROWS}")
    if len(counting) < len(rows):
        print(f"{len(rows)} rows with all alternatives in {folder / collecting.ALL_ROWS}")
    if open_runs:
        print(f"{len(open_runs)} runs are not done yet (e.g. {open_runs[0].run_id}: {open_runs[0].state})")
    return 0


def report(args: argparse.Namespace) -> int:
    """Collect, fit and report."""
    folder = load(args.sweep, args.root).folder
    counting, _ = collecting.collect(folder)
    print(f"{len(counting)} rows in {folder / collecting.ROWS}")
    return fit_and_report(folder, args.x, args.metric, args.dataset)


def fit_and_report(folder: Path, x: str, metric: str, dataset: str | None = None) -> int:
    """Run the fit and report commands on a folder with rows.csv; returns the report's exit code.

    The fit is of one metric on one dataset (the first in the rows, if none is named); the report fits the others alike.
    """
    from clip_linear_eval.commands import fit, report
    from clip_linear_eval.results import read_rows

    rows = folder / collecting.ROWS
    found = [str(row["dataset"]) for row in read_rows(rows) if row["metric"] == metric]
    if dataset is None and not found:
        raise UserError(f"no finished run has a row with metric {metric!r}; run: clip-linear launch status")
    where = ["--where", f"metric={metric}", "--where", f"dataset={dataset or found[0]}"]
    (folder / "fit.json").unlink(missing_ok=True)
    try:
        fit.main([str(rows), "--x", x, "--y", "error", "--group", "image_variant", *where, "--out", str(folder)])
    except UserError as error:  # too few sizes for a law: the report shows the points and says so
        print(f"no fit: {error}")
    return int(report.main([str(folder)]))
