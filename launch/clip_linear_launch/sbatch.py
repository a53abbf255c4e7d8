"""Slurm jobs as text: the sbatch parameters of a run, plain scripts, and asking Slurm whether it would take them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clip_linear.errors import UserError
from clip_linear.files import write_text
from clip_linear_launch import rundir, scheduler, spec
from clip_linear_launch.expand import Run
from clip_linear_launch.sweep import Sweep

_SIMPLE = ("partition", "qos", "account", "constraint", "nodelist", "comment", "mail_type", "mail_user")


def groups(sweep: Sweep, runs: Iterable[Run]) -> list[list[Run]]:
    """Runs of equal resources together; each group becomes one or more arrays."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(json.dumps(asdict(run.resources), sort_keys=True), []).append(run)
    for group in found.values():
        if group[0].resources.time_s is None:
            raise UserError('Slurm needs a time limit; give [resources] time = "HH:MM:SS"')
        check_delay(sweep, group[0].resources)
    return list(found.values())


def check_delay(sweep: Sweep, resources: spec.Resources) -> None:
    """Raise UserError when a run would be told to stop as soon as it starts."""
    time_s, delay = resources.time_s, sweep.limits.signal_delay_s
    if time_s is not None and delay >= time_s:
        raise UserError(
            f"[limits] signal_delay_s = {delay} is not below [resources] time = {resources.time} ({time_s} s): "
            "the run would be told to stop at once; lower the delay or raise the time"
        )


def parameters(sweep: Sweep, resources: spec.Resources, job_name: str, exclude: Iterable[str] = ()) -> dict[str, Any]:
    """The parameters of submitit's SlurmExecutor for one resource group."""
    r = resources
    assert r.time_s is not None
    params: dict[str, Any] = {
        "job_name": job_name,
        "time": max(1, -(-r.time_s // 60)),
        "nodes": r.nodes,
        "ntasks_per_node": r.tasks,
        "signal_delay_s": sweep.limits.signal_delay_s,
        "array_parallelism": sweep.limits.array_parallelism,
        "srun_args": srun_args(r),
        "stderr_to_stdout": False,
    }
    params |= {key: getattr(r, key) for key in _SIMPLE if getattr(r, key) is not None}
    if r.gpus_per_node:
        params["gpus_per_node"] = r.gpus_per_node
    if r.cpus_per_task:
        params["cpus_per_task"] = r.cpus_per_task
    if r.mem_gb is not None:
        params["mem"] = f"{round(r.mem_gb * 1024)}M"
    excluded = [*r.exclude, *exclude]
    if excluded:
        params["exclude"] = ",".join(dict.fromkeys(excluded))
    if r.exclusive:
        params["exclusive"] = True
    if r.setup:
        params["setup"] = list(r.setup)
    more: dict[str, Any] = {"requeue": True}  # after node loss and preemption; the state is on disk
    if r.reservation is not None:
        more["reservation"] = r.reservation
    params["additional_parameters"] = more | r.extra
    return params


def srun_args(resources: spec.Resources) -> list[str]:
    """One dead rank ends the step (the others would hang in a collective); cpus-per-task again, since srun of
    Slurm 22.05 and later does not take it from sbatch."""
    cpus = [f"--cpus-per-task={resources.cpus_per_task}"] if resources.cpus_per_task else []
    return ["--kill-on-bad-exit=1", *cpus, *resources.srun_args]


def python(resources: spec.Resources) -> str:
    """The shell command that starts Python in the job."""
    return resources.python or shlex.quote(sys.executable)


def script(sweep: Sweep, group: list[Run]) -> str:
    """A plain sbatch script that runs a group (as an array if there are several) without submitit."""
    r = group[0].resources
    p = parameters(sweep, r, job_name=f"clip-{sweep.head.name}")
    log = sweep.folder / "sbatch" / "%x-%j.log"
    options: dict[str, Any] = {
        "job-name": p["job_name"],
        "time": p["time"],
        "nodes": p["nodes"],
        "ntasks-per-node": p["ntasks_per_node"],
        "signal": f"USR2@{p['signal_delay_s']}",
        "open-mode": "append",
        "output": log,
    }
    optional = (*_SIMPLE, "gpus_per_node", "cpus_per_task", "mem", "exclude", "exclusive")
    options |= {key.replace("_", "-"): p[key] for key in optional if key in p}
    options |= p["additional_parameters"]
    if len(group) > 1:
        options["array"] = f"0-{len(group) - 1}%{sweep.limits.array_parallelism}"
    lines = ["#!/bin/bash"]
    for key, value in options.items():
        lines.append(f"#SBATCH --{key}" if value is True else f"#SBATCH --{key}={shlex.quote(str(value))}")
    lines += list(r.setup)
    folders = " ".join(shlex.quote(str(rundir.folder(sweep.folder, run.run_id))) for run in group)
    lines.append(f"runs=({folders})")
    worker = f'{python(r)} -m clip_linear_launch.worker "${{runs[${{SLURM_ARRAY_TASK_ID:-0}}]}}"'
    lines.append(f"exec srun {shlex.join(srun_args(r))} {worker}")
    return "\n".join(lines) + "\n"


def export(sweep: Sweep, runs: list[Run], out: Path) -> list[Path]:
    """Write the scripts of all groups, split to Slurm's MaxArraySize where it is known; returns their paths."""
    paths: list[Path] = []
    for group in groups(sweep, runs):
        for part in split(group, max_array_size()):
            path = out / f"{sweep.head.name}-{len(paths):02d}.sbatch"
            write_text(path, script(sweep, part))
            paths.append(path)
    (sweep.folder / "sbatch").mkdir(parents=True, exist_ok=True)
    return paths


def split(group: list[Run], size: int) -> list[list[Run]]:
    """Parts of at most ``size`` runs."""
    return [group[i : i + size] for i in range(0, len(group), size)]


def max_array_size() -> int:
    """How many elements an array may have here: indices stay below MaxArraySize (Slurm's default is 1001)."""
    return max(1, int(scheduler.config().get("MaxArraySize") or 1001) - 1)


def test_only(text: str) -> tuple[bool, str]:
    """Whether Slurm would take a script, and what it says; nothing is submitted."""
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as f:
        f.write(text)
        f.flush()
        try:
            command = ["sbatch", "--test-only", f.name]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=scheduler.clean_env())
        except FileNotFoundError:
            return True, "no sbatch here to ask"
        except subprocess.TimeoutExpired:
            return False, "sbatch did not answer within 60 s"
    answer = " ".join((done.stderr or done.stdout).split()).replace("sbatch: ", "")
    return done.returncode == 0, answer
