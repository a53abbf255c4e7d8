"""What the fit refuses, warns about and leaves out, with its code, from odd and bad tables."""

import json

import numpy as np
import pytest

from clip_linear.__main__ import main as clip_linear
from clip_linear_eval.commands.fit import main
from clip_linear_eval.fit import FitRefused, fit_law

SIZES = np.geomspace(1e7, 1e9, 9)
ERRORS = 95 * SIZES**-0.3


def table(path, **columns):
    """A CSV of these columns."""
    names = list(columns)
    lines = [",".join(str(v) for v in row) for row in zip(*(columns[n] for n in names))]
    path.write_text("\n".join([",".join(names), *lines]) + "\n")
    return str(path)


@pytest.fixture
def fit(tmp_path, capsys):
    """Fit columns by the command; returns (exit code, JSON)."""

    def run(*flags, **columns):
        argv = [table(tmp_path / "rows.csv", **columns), "--json", *flags]
        code = main(argv if "--x" in flags else [*argv, "--x", "x", "--y", "y"])
        return code, json.loads(capsys.readouterr().out)

    return run


def codes(found):
    return {w["code"] for w in found["warnings"]}


def refused(answer, code):
    status, found = answer
    assert status == 2 and found["status"] == "refused" and found["code"] == code, found
    return found


def test_one_size_is_no_law(fit):
    refused(fit(x=[1e8] * 5, y=[0.3, 0.31, 0.29, 0.3, 0.32]), "single_x")
    refused(fit(x=[1e8], y=[0.3]), "insufficient_points")


@pytest.mark.parametrize(("form", "n"), [("power", 1), ("saturating", 2), ("shifted", 3)])
def test_fewer_sizes_than_parameters(fit, form, n):
    refused(fit("--form", form, x=SIZES[:n], y=ERRORS[:n]), "insufficient_points")
    status, found = fit("--form", form, x=SIZES[: n + 1], y=ERRORS[: n + 1])
    assert status == 0 and "zero_dof" in codes(found)
    assert found["groups"]["all"]["ci95"] is None and found["groups"]["all"]["dof"] == 0


def test_nothing_positive(fit):
    refused(fit(x=SIZES, y=[0, -1, "nan", "", "inf", "n/a", "diverged", -2, 0]), "no_positive_rows")


def test_missing_columns_are_all_named(fit):
    found = refused(fit("--x", "size", "--y", "loss", "--group", "variant", x=SIZES, y=ERRORS), "missing_column")
    assert found["missing"] == ["size", "loss", "variant"] and "x, y" in found["message"]


def test_mixed_units_in_a_column_of_units(fit):
    unit = ["fraction"] * 5 + ["percent"] * 4
    refused(fit(x=SIZES, y=np.where(np.arange(9) < 5, ERRORS, 100 * ERRORS), unit=unit), "mixed_units")


@pytest.mark.parametrize("flags", [(), ("--unit", "fraction"), ("--unit", "percent")])
@pytest.mark.parametrize("percent", [slice(0, 4), slice(1, 9, 2), slice(6, 9)])
def test_mixed_units_seen_in_the_numbers(fit, flags, percent):
    y = ERRORS.copy()
    y[percent] *= 100
    refused(fit(*flags, x=SIZES, y=y), "mixed_units")


def test_losses_around_one_are_not_mixed(fit):
    x = np.geomspace(2e7, 3e8, 6)
    status, found = fit("--unit", "loss", x=x, y=593 * x**-0.362)
    assert status == 0 and codes(found) == {"short_range"}
    status, found = fit(x=x, y=593 * x**-0.362)
    assert status == 0 and codes(found) == {"short_range"}


def test_percent_becomes_a_fraction(fit):
    _, found = fit("--unit", "percent", x=SIZES, y=100 * ERRORS)
    assert found["groups"]["all"]["params"]["A"] == pytest.approx(95, rel=1e-9)
    assert codes(found) == set() and "percent" in found["conventions"]["unit"]
    _, found = fit("--unit", "percent", x=SIZES, y=ERRORS)
    assert codes(found) == {"unit_mismatch"}


def test_rising_and_flat(fit):
    assert "increasing_y" in codes(fit(x=SIZES, y=1 - ERRORS)[1])
    noise = np.random.default_rng(0).normal(size=9)
    assert "increasing_y" in codes(fit(x=SIZES, y=0.1 * (SIZES / 1e7) ** 0.2 * np.exp(0.02 * noise))[1])
    for form in ("power", "saturating", "shifted"):
        _, found = fit("--form", form, x=SIZES, y=[0.25] * 9)
        assert "degenerate_y" in codes(found)
        assert found["groups"]["all"]["cost"] < 1e-20


def test_short_range_is_under_two_decades(fit):
    for decades, short in ((1.14, True), (1.99, True), (2, False), (4, False)):
        x = np.geomspace(1e7, 1e7 * 10**decades, 6)
        assert ("short_range" in codes(fit(x=x, y=95 * x**-0.3)[1])) == short


def test_thirty_decades(fit):
    x = np.geomspace(1e-5, 1e25, 25)
    y = 1e-3 * x**-0.05
    _, found = fit(x=x, y=y)
    assert found["groups"]["all"]["params"]["alpha"] == pytest.approx(0.05, rel=1e-9)
    assert found["groups"]["all"]["params"]["A"] == pytest.approx(1e-3, rel=1e-9)
    _, found = fit("--form", "saturating", x=x, y=0.1 + 0.5 * x**-0.15)
    params = found["groups"]["all"]["params"]
    assert (params["E"], params["A"], params["alpha"]) == pytest.approx((0.1, 0.5, 0.15), rel=1e-6)
    assert codes(found) == set()


def test_the_floor_is_not_identified(fit):
    x = np.geomspace(22e6, 304e6, 6)
    y = (0.12 + 30 * x**-0.21) * np.exp(0.01 * np.random.default_rng(2).normal(size=6))
    _, found = fit("--form", "saturating", x=x, y=y)
    law = found["groups"]["all"]
    assert codes(found) == {"short_range", "E_not_identified"}
    assert law["ci95"]["E"][0] == 0 and law["identified"]["E"] is False
    assert "0 to" in next(w["message"] for w in found["warnings"] if w["code"] == "E_not_identified")


def test_dropped_rows_are_listed_by_number(fit):
    y = [*ERRORS[:3], 0, "nan", *ERRORS[5:]]
    _, found = fit("--max-x", "9e8", "--drop-top-y", "1", x=SIZES, y=y)
    assert [d["row"] for d in found["dropped"]] == [1, 4, 5, 9]
    reasons = " ".join(d["reason"] for d in found["dropped"])
    for word in ("highest", "positive", "finite", "--max-x"):
        assert word in reasons
    assert found["groups"]["all"]["n"] == 5 and found["groups"]["all"]["n_rows"] == 9


def test_diverged_runs_are_left_out(fit):
    _, found = fit(x=SIZES, y=ERRORS, status=["done"] * 7 + ["diverged", "running"])
    assert [d["reason"] for d in found["dropped"]] == ["status diverged", "status running"]
    assert found["groups"]["all"]["n"] == 7 and found["groups"]["all"]["n_rows"] == 9


def test_empty_columns_do_no_harm(fit):
    empty = {
        c: [""] * 9 for c in ("status", "unit", "run_id", "metric", "dataset", "value", "seed", "model", "provenance")
    }
    status, found = fit("--group", "v", "--bootstrap", "10", x=SIZES, y=ERRORS, v=["a"] * 9, **empty)
    assert status == 0 and codes(found) == set() and found["groups"]["a"]["n"] == 9
    assert found["groups"]["a"]["bootstrap"]["clusters"] == 9


def test_where_selects_and_says_what_there_is(fit, tmp_path):
    kind = ["a"] * 5 + ["b"] * 4
    assert fit("--where", "kind=a", x=SIZES, y=ERRORS, kind=kind)[1]["groups"]["all"]["n"] == 5
    assert fit("--where", "seed=1", x=SIZES, y=ERRORS, seed=[0, 1] * 4 + [1])[1]["groups"]["all"]["n"] == 5
    assert (
        "there are: a, b"
        in refused(fit("--where", "kind=c", x=SIZES, y=ERRORS, kind=kind), "no_positive_rows")["message"]
    )
    assert refused(fit("--where", "sort=c", x=SIZES, y=ERRORS), "missing_column")["missing"] == ["sort"]


def long_rows(metrics=("top1",), unit="fraction", datasets=("flags",)):
    """Rows as our schema has them."""
    cells = [(x, y, m, d) for m in metrics for d in datasets for x, y in zip(SIZES, ERRORS)]
    return {
        "n_params_vision": [c[0] for c in cells],
        "value": [(1 if unit == "fraction" else 100) * (1 - c[1]) for c in cells],
        "metric": [c[2] for c in cells],
        "dataset": [c[3] for c in cells],
        "unit": [unit] * len(cells),
    }


@pytest.mark.parametrize("unit", ["fraction", "percent"])
def test_error_of_our_rows_is_derived_and_said(fit, unit):
    status, found = fit("--x", "n_params_vision", "--y", "error", **long_rows(unit=unit))
    assert status == 0
    assert found["groups"]["all"]["params"]["A"] == pytest.approx(95, rel=1e-9)
    assert "- value of metric top1" in found["conventions"]["y"]
    assert "vision tower" in found["conventions"]["n_params_vision"]
    assert "increasing_y" in codes(fit("--x", "n_params_vision", "--y", "value", **long_rows(unit=unit))[1])


def test_metrics_and_datasets_are_not_mixed(fit):
    flags = ("--x", "n_params_vision", "--y", "error")
    for rows in (long_rows(metrics=("top1", "top5")), long_rows(datasets=("flags", "people"))):
        assert "--where" in refused(fit(*flags, **rows), "mixed_units")["message"]
    refused(fit(*flags, **long_rows(metrics=("loss",))), "missing_column")


def test_a_group_that_cannot_be_fitted_does_not_hide_the_others(fit):
    x, y = [*SIZES, 1e8], [*ERRORS, 0.4]
    _, found = fit("--group", "v", x=x, y=y, v=["softmax"] * 9 + ["mala"])
    assert list(found["groups"]) == ["softmax"]
    assert {"insufficient_points"} == codes(found) and found["warnings"][0]["group"] == "mala"


def test_python_refuses_with_the_same_codes():
    with pytest.raises(FitRefused) as caught:
        fit_law([1e8, 1e8], [0.1, 0.2])
    assert caught.value.code == "single_x" and isinstance(caught.value, ValueError)
    for form, objective in (("cubic", "gaussian"), ("power", "huge")):
        with pytest.raises(ValueError, match="unknown"):
            fit_law(SIZES, ERRORS, form, objective=objective)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--form", "chinchilla"], "--x2"),
        (["--x2", "y"], "chinchilla"),
        (["--form", "isoflop"], "--budget"),
        (["--predict", "a,b"], "--predict"),
        (["--predict", "-1"], "--predict"),
        (["--hold-out", "0"], "--hold-out"),
        (["--bootstrap", "-5"], "--bootstrap"),
        (["--where", "x"], "COLUMN=VALUE"),
        (["--group", "v", "--ref", "sofmax"], "softmax"),
        (["--hold-out", "8"], "leaves 1"),
        (["--sigma", "seeds"], "two or more"),
        (["--ref", "softmax"], "--group"),
        (["--form", "isoflop", "--budget", "y", "--hold-out", "1"], "no meaning"),
        (["--form", "chinchilla", "--x2", "y", "--frontier", "pareto"], "no meaning"),
        (["--sigma", "y", "--objective", "l1"], "sigma"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(tmp_path, capsys, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    rows = table(tmp_path / "rows.csv", x=SIZES, y=ERRORS, v=["softmax"] * 9)
    assert clip_linear(["fit", rows, "--x", "x", "--y", "y", *flags]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
    assert not (tmp_path / "fit.json").exists()


def test_unreadable_files(tmp_path, capsys):
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01" * 10)
    (tmp_path / "bad.jsonl").write_text("{nope\n")
    for name in ("none.csv", "empty.csv", "binary.csv", "bad.jsonl"):
        assert clip_linear(["fit", str(tmp_path / name), "--x", "x", "--y", "y"]) == 2
        err = capsys.readouterr().err
        assert name in err and err.count("\n") == 1


def test_other_kinds_of_files_hold_the_same_rows(tmp_path, capsys):
    import pandas as pd

    frame = pd.DataFrame({"x": SIZES, "y": ERRORS})
    frame.to_csv(tmp_path / "a.csv", index=False, encoding="utf-8-sig")
    frame.to_json(tmp_path / "a.jsonl", orient="records", lines=True, double_precision=15)
    files = ["a.csv", "a.jsonl"]
    try:
        frame.to_parquet(tmp_path / "a.parquet")
        files.append("a.parquet")
    except ImportError:  # parquet needs the extra of that name
        pass
    for name in files:
        assert main([str(tmp_path / name), "--x", "x", "--y", "y", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["groups"]["all"]["params"]["A"] == pytest.approx(95, rel=1e-6)
