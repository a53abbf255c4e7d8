"""A sweep on the local Slurm, as a user drives it, and what tests do to the cluster meanwhile."""

import json
import os
import stat
import subprocess

from clip_linear_launch import rundir
from tests.launch.bench import Bench

TIMEOUT_S = 150


class Cluster(Bench):
    """Nodes 3 and 4 are left to the tests that preempt and kill."""

    def __init__(self, folder, exclude=("node3", "node4")):
        super().__init__(folder)
        self.exclude = list(exclude)

    def write(self, grid=None, how="", samples=320, resources="", limits="", **more):
        limits = limits if "signal_delay_s" in limits else f"signal_delay_s = 20\n{limits}"
        resources = resources if "time" in resources else f"time = 5\n{resources}"
        resources = resources if "nodelist" in resources else f"exclude = {json.dumps(self.exclude)}\n{resources}"
        tables = f"[resources]\n{resources}\n[limits]\n{limits}\n{more.pop('more', '')}"
        sweep = 'backend = "slurm"\n' + more.pop("sweep", "")
        return super().write(grid, how, samples, sweep=sweep, more=tables, **more)

    def submitted(self, run_dir=None):
        return rundir.read((run_dir or self.run_dir()) / "submitted.json")

    def job(self, run_dir=None):
        return self.submitted(run_dir)["job"]

    def wait_for(self, *states, timeout_s=TIMEOUT_S):
        """Wait until every run is in one of the states; returns the statuses."""
        last = []

        def reached():
            last[:] = self.status()
            # done.json is written before the trainer ends; its worker then closes the attempt's record.
            closed = all("class" in a for s in last if s["state"] == "DONE" for a in self.attempts_of(s["run_id"]))
            return closed and all(s["state"] in states for s in last)

        self.until(reached, f"{states}", timeout_s, every_s=0.5)
        return last

    def attempts_of(self, run_id):
        return rundir.attempts(rundir.folder(self.sweep, run_id))

    def wait_for_step(self, step, run_dir=None, timeout_s=TIMEOUT_S):
        folder = run_dir or self.run_dir()
        self.until(lambda: self.step(folder) >= step, f"step {step}", timeout_s)

    def total(self, run_dir=None):
        return rundir.read((run_dir or self.run_dir()) / "done.json")["total"]

    def shim(self, name, body):
        """A command of this name for use before the real one on PATH; returns its folder."""
        folder = self.folder / f"shim-{name}"
        folder.mkdir(exist_ok=True)
        path = folder / name
        path.write_text(f"#!/bin/bash\nexport PATH=${{PATH#{folder}:}}\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return folder

    def end(self):
        jobs = [j for d in self.runs() if (j := self.submitted(d).get("job"))]
        if jobs:
            subprocess.run(["scancel", *jobs], capture_output=True, timeout=60)


def expected_total(steps):
    """What uninterrupted steps of the stand-in add up to, bit for bit."""
    total = 0.0
    for step in range(1, steps + 1):
        total += 1.0 / step
    return total


def slurm(*command, check=True):
    """The output of a Slurm client."""
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=check, env=os.environ).stdout
