"""Laying out a sweep's folder: a folder a run, with the command as data in run.json."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from clip_linear.errors import UserError
from clip_linear.files import write_json
from clip_linear_launch import rundir
from clip_linear_launch.expand import Run
from clip_linear_launch.sweep import Sweep

SWEEP = "sweep.json"  # what was laid out last: the sweep file's path and digest, and the ids of its runs in order


def command(sweep: Sweep, run: Run) -> list[str]:
    """The command of a run as data: ``python`` and ``{run_dir}`` are filled in by the worker, wherever it runs."""
    argv = [*sweep.head.command, *run.argv]
    if sweep.eval.datasets:
        argv += ["--eval-data", *sweep.eval.datasets]
    return [*argv, "--run-dir", "{run_dir}"]


def record(sweep: Sweep, run: Run) -> dict[str, Any]:
    """What run.json holds: the command, where it starts, and what tables and schedulers need to know of it."""
    return {
        "run_id": run.run_id,
        "sweep": sweep.head.name,
        "argv": command(sweep, run),
        "cwd": str(sweep.here),
        "model": run.model,
        "image_variant": run.image,
        "text_variant": run.text,
        "samples": run.samples,
        "global_batch": run.global_batch,
        "steps": run.steps,
        "seed": run.seed,
        "image_size": run.image_size,
        "cell": run.cell,
        "tuning": run.tuning,
        "size": asdict(run.size),
        "resources": asdict(run.resources),
        "limits": asdict(sweep.limits),
    }


def lay_out(sweep: Sweep, runs: list[Run]) -> list[Path]:
    """Write every run's run.json (a finished run's is left as it is) and sweep.json; returns the runs' folders."""
    try:
        sweep.folder.mkdir(parents=True, exist_ok=True)
    except (NotADirectoryError, FileExistsError) as error:
        raise UserError(f"the sweep's folder {str(sweep.folder)!r} cannot be made: {error.strerror}") from None
    folders = []
    for run in runs:
        folder = rundir.folder(sweep.folder, run.run_id)
        if not ((folder / rundir.DONE).exists() and (folder / rundir.RUN).exists()):
            wanted = record(sweep, run)
            if rundir.read(folder / rundir.RUN) != wanted:
                write_json(folder / rundir.RUN, wanted)
        folders.append(folder)
    laid_out: dict[str, Any] = {"path": str(sweep.path), "digest": sweep.digest, "name": sweep.head.name}
    laid_out |= {"runs": [run.run_id for run in runs]}
    if rundir.read(sweep.folder / SWEEP) != laid_out:
        write_json(sweep.folder / SWEEP, laid_out)
    return folders
