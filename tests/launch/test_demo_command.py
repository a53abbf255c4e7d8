"""The demo command: its folder, its sweep, and (slow) the whole loop."""

import json
import subprocess
import sys

import pytest

from clip_linear.errors import UserError
from clip_linear_launch import demo
from clip_linear_launch.sweep import load


def command(*args, timeout=1500):
    done = subprocess.run(
        [sys.executable, "-m", "clip_linear", "demo", *map(str, args)], capture_output=True, text=True, timeout=timeout
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_it_does_not_touch_a_folder_with_other_files(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    done = command("--out", tmp_path)
    assert done.returncode == 2 and "other files" in done.stderr and len(list(tmp_path.iterdir())) == 1
    done = command("--out", tmp_path / "thesis.tex")
    assert done.returncode == 2 and "is a file" in done.stderr


@pytest.mark.parametrize("args", [("--samples", "0"), ("--seeds", "-1"), ("--smaples", "3")])
def test_bad_numbers_are_one_line(tmp_path, args):
    done = command("--out", tmp_path / "d", *args)
    assert done.returncode == 2 and not (tmp_path / "d").exists()


@pytest.mark.parametrize("name", ["demo", "demo-quick"])
def test_the_packaged_sweeps_scale(tmp_path, name):
    (tmp_path / "sweep.toml").write_text(demo.sweep_text(name, 1234, 3))
    sweep = load(tmp_path / "sweep.toml")
    assert sweep.folder == tmp_path.resolve()
    assert sweep.grid["samples"] == [1234] and sweep.grid["seed"] == [0, 1, 2]
    with pytest.raises(UserError, match="--samples"):
        demo.sweep_text(name, 0, None)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_loop(tmp_path):
    out = tmp_path / "d"
    done = command("--quick", "--samples", 640, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().splitlines()[-1] == str(out / "report.html")
    assert {"data", "runs", "rows.csv", "report.html", "report.md"} <= {p.name for p in out.iterdir()}
    runs = [json.loads((d / "run.json").read_text()) for d in (out / "runs").iterdir()]
    assert len(runs) == 9
    html = (out / "report.html").read_text()
    assert all(run["run_id"] in html for run in runs)
    before = {p: p.stat().st_mtime_ns for p in (out / "runs").rglob("*") if p.is_file() and p.name != ".lock"}
    done = command("--quick", "--samples", 640, "--out", out)
    assert "9 DONE; 0 to start" in done.stdout
    assert before == {p: p.stat().st_mtime_ns for p in (out / "runs").rglob("*") if p.is_file() and p.name != ".lock"}
