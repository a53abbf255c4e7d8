"""A sweep whose training command only counts steps, and the command line as a user has it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

STAND_IN = Path(__file__).with_name("stand_in.py")


class Bench:
    """A folder with a sweep file and the command line."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.toml = folder / "mini.toml"
        self.sweep = folder / "out" / "mini"

    def write(self, grid=None, how="", samples=320, sweep="", more="", base=""):
        """320 samples of batch 64 are 5 steps; ``how`` says how the stand-in behaves."""
        (self.folder / "data").mkdir(exist_ok=True)
        (self.folder / "data" / "0.tar").touch()
        grid = grid or 'model = ["ViT-S-32"]\nimage = ["softmax"]'
        self.toml.write_text(
            f'[sweep]\nname = "mini"\nroot = "out"\ncommand = ["python", "{STAND_IN}"]\n{sweep}\n'
            f'[base]\ntrain-data = "data/*.tar"\nbatch-size = 64\nname = "{how}"\n{base}\n'
            f"[grid]\nsamples = [{samples}]\n{grid}\n{more}\n"
        )
        return self

    def launch(self, action, *args, code=0, path=""):
        """Run ``clip-linear launch``; returns its output. The exit code must be ``code``."""
        command = [sys.executable, "-m", "clip_linear", "launch", action, str(self.toml), *map(str, args)]
        env = os.environ | {"PATH": f"{path}:{os.environ['PATH']}" if path else os.environ["PATH"]}
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.folder, timeout=200, env=env)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout + done.stderr

    def start(self, action, *args):
        """The same in the background."""
        command = [sys.executable, "-m", "clip_linear", "launch", action, str(self.toml), *map(str, args)]
        return subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def status(self):
        return json.loads(self.launch("status", "--json"))

    def runs(self):
        return sorted((self.sweep / "runs").iterdir()) if (self.sweep / "runs").exists() else []

    def run_dir(self):
        (only,) = self.runs()
        return only

    def attempts(self, run_dir=None):
        from clip_linear_launch import rundir

        return rundir.attempts(run_dir or self.run_dir())

    def until(self, true, what, timeout_s=120, every_s=0.02):
        """Wait for a condition, watching closely; fails loudly."""
        deadline = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
            time.sleep(every_s)

    def release(self):
        """Let runs that hold go on."""
        for run_dir in self.runs():
            (run_dir / "go").touch()

    def hold(self, step, runs=1):
        """Wait until so many runs hold at a step."""
        self.until(
            lambda: self.sweep.exists() and sum(self.step(d) == step for d in self.runs()) == runs,
            f"{runs} at step {step}",
        )

    def step(self, run_dir):
        from clip_linear_launch import rundir

        return rundir.step(run_dir)
