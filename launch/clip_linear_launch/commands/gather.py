"""``launch collect`` and ``launch report``."""

from __future__ import annotations

import argparse
import importlib
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
    return fit_and_report(folder, args.x)


def fit_and_report(folder: Path, x: str) -> int:
    """Run the fit and report commands on a folder with rows.csv; returns the report's exit code."""
    fit, report = (importlib.import_module(f"clip_linear_eval.commands.{name}") for name in ("fit", "report"))
    rows = folder / collecting.ROWS
    try:
        fit.main([str(rows), "--x", x, "--y", "error", "--group", "image_variant", "--out", str(folder / "fit.json")])
    except UserError as error:  # too few sizes: the report says so, and shows the points
        print(f"fit: {error}")
    return int(report.main([str(folder)]))
