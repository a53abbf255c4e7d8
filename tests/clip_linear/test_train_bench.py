"""``clip-linear bench train``: rows of both sides, and no timing of two things that differ."""

import json

import pytest

from clip_linear.errors import RunError
from clip_linear_launch import bench_train
from tests.clip_linear.train_helpers import write_model


def flags(tmp_path):
    model = write_model(tmp_path) + "+mala"
    return ["--model", model, "--batch-size", "4", "--rounds", "3", "--steps", "2", "--device", "cpu"]


def test_rows_of_both_sides(tmp_path, capsys):
    assert bench_train.main([*flags(tmp_path), "--json", "--out", str(tmp_path / "rows.csv")]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [r["metric"] for r in rows] == ["step_s_ours", "step_s_open_clip", "overhead"]
    assert all(
        r["ci_low"] <= r["value"] <= r["ci_high"] and r["n"] == 3 and r["provenance"] == "measured" for r in rows
    )
    assert (tmp_path / "rows.csv").read_text().count("\n") == 4


def test_different_losses_are_not_timed(tmp_path, monkeypatch):
    theirs = bench_train._theirs

    def other(args, folder):
        run, losses, device = theirs(args, folder)
        return (lambda steps: (run(steps), losses.__setitem__(2, losses[2] * 1.001))), losses, device

    monkeypatch.setattr(bench_train, "_theirs", other)
    with pytest.raises(RunError, match="not timed: at step 3"):
        bench_train.main(flags(tmp_path))
