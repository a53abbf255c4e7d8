"""The attention benchmark, the GPU check's dry run and the doctor, through their own doors."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _run(*argv, **env):
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, env={**os.environ, **env})


def test_bench_writes_what_it_prints(tmp_path):
    options = ["--variants", "mala", "--lengths", "33", "65", "--budget-s", "0.02", "--heads", "2", "--head-dim", "16"]
    run = _run("-m", "clip_linear", "bench", "attention", *options, "--out", str(tmp_path), "--json")
    assert run.returncode == 0, run.stderr
    printed = json.loads(run.stdout)
    (table,) = tmp_path.glob("attention_cpu_float32_b1_h2_d16_t*.csv")
    first, *lines = table.read_text().splitlines()
    assert first.startswith("# clip-linear bench attention --variants mala")
    rows = list(csv.DictReader(lines))
    assert len(rows) == len(printed["rows"]) == 2 * 2 * 2 * 4  # lengths, causal, directions, candidates
    assert table.with_suffix(".svg").read_text().startswith("<?xml")
    for row in rows:
        assert float(row["y_value_20"]) <= float(row["y_value_50"]) <= float(row["y_value_80"])
        sdpa = row["kernel_provider"] == "sdpa"
        assert (float(row["ratio_to_sdpa"]) == 1) == sdpa
    assert {s["kernel_name"] for s in printed["summary"]} == {"mala"}


def test_bench_shows_no_speed_on_red(monkeypatch, tmp_path, capsys):
    from clip_linear.__main__ import main
    from clip_linear_launch import bench_attention_measure

    monkeypatch.setitem(bench_attention_measure.TOLERANCE, "float32", 1e-12)
    code = main(["bench", "attention", "--variants", "elu", "--lengths", "9", "--out", str(tmp_path)])
    seen = capsys.readouterr()
    assert code == 1
    assert seen.out == ""
    assert "elu output is off by" in seen.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--variants", "rellu"], "did you mean 'relu'"),
        (["--variants", "softmax"], "compared with"),
        (["--heads", "0"], "--heads is 0"),
        (["--lengths", "0"], "positive"),
        (["--peers", "--device", "cpu"], "needs a GPU"),
    ],
)
def test_bench_says_what_is_wrong(argv, words, capsys):
    from clip_linear.__main__ import main

    assert main(["bench", "attention", *argv]) == 2
    assert words in capsys.readouterr().err


def test_doctor(capsys):
    from clip_linear.__main__ import main

    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {c["backend"] for c in found["chosen"] if c["dtype"] == "float64"} == {"eager"}
    cpu = next(c for c in found["chosen"] if (c["device"], c["dtype"]) == ("cpu", "float32"))
    assert cpu["backend"] == ("cpp" if found["cpu_kernel"]["instruction_set"] else "eager")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "CPU kernel" in text
    assert "largest error" in text


def test_a_wrong_backend_is_said_in_one_line():
    run = _run("-m", "clip_linear", "doctor", CLIP_LINEAR_BACKEND="cuda")
    assert run.returncode == 0
    assert len(run.stderr.strip().splitlines()) == 1
    assert "CLIP_LINEAR_BACKEND is ignored: unknown backend 'cuda'; known: triton, cpp" in run.stderr


@pytest.mark.slow
def test_gpu_check_runs_dry(tmp_path):
    pytest.importorskip("triton")
    out = tmp_path / "check.jsonl"
    run = _run(str(ROOT / "kernels/bench/gpu_check.py"), "--dry", "--out", str(out))
    assert run.returncode == 0, run.stderr[-2000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["what"] for r in rows][-1] == "done"
    assert next(r for r in rows if r["what"] == "gate")["red"] == 0
    assert {(r["name"], r["causal"]) for r in rows if r["what"] == "time"} >= {("mala", False), ("mala", True)}


@pytest.mark.gpu
def test_gate_on_a_gpu(tmp_path):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; run with: pytest -m gpu")
    run = _run(str(ROOT / "kernels/bench/gpu_check.py"), "--budget-s", "60", "--out", str(tmp_path / "check.jsonl"))
    assert run.returncode == 0, run.stdout[-2000:]
