"""The command: tasks, several checkpoints, files of results, what is not done twice, comparison, the page."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest

from clip_linear.__main__ import main
from clip_linear_eval.results import ROW_FIELDS, read_rows
from clip_linear_eval.saved import load_rows
from tests.eval.evalsets import NAMES


@pytest.fixture
def flags(config: Path, weights: Path, folder: Path) -> list[str]:
    return ["eval", "--model", str(config), "--pretrained", str(weights), "--dataset", str(folder)]


@pytest.fixture(scope="module")
def checkpoints(clip, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of one run whose image towers differ."""
    import torch

    root = tmp_path_factory.mktemp("curve")
    state = {k: v.clone() for k, v in clip[0].state_dict().items()}
    for step in (2, 10, 1):
        noise = torch.randn(state["visual.proj"].shape, generator=torch.Generator().manual_seed(step))
        changed = state | {"visual.proj": state["visual.proj"] + 0.1 * step * noise}
        torch.save({"state_dict": changed, "samples_seen": 64 * step}, root / f"step_{step}.pt")
    return root


def run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict]:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


FLAGS = """--model --pretrained --dataset --dataset-type --classnames --templates --labels --restrict --split --tasks
--data-root --batch-size --precision --device --workers --limit --on-error --topk --hierarchy --probe --train-dataset
--json --out --predictions --compare --per-class --html --format --help"""


def test_flags_are_frozen() -> None:
    from clip_linear_eval.cli import parser

    assert {flag for action in parser()._actions for flag in action.option_strings} == {*FLAGS.split(), "-h"}


def test_rows_hold_the_schema_and_the_conditions(flags: list[str], capsys) -> None:
    rows = run(flags, capsys)
    assert list(rows[0])[: len(ROW_FIELDS)] == list(ROW_FIELDS)
    row = rows[0]
    assert row["provenance"] == "measured" and row["precision"] == "fp32" and "torch" in row["versions"]
    assert row["n_params_total"] == row["n_params_vision"] + row["n_params_text"] + 1
    assert row["image_variant"] == row["text_variant"] == "none"
    assert row["gmacs_total"] == pytest.approx(row["gmacs"] * 640)


def test_several_checkpoints_are_a_curve(flags: list[str], checkpoints: Path, capsys, tmp_path: Path) -> None:
    at = flags.index("--pretrained")
    page = tmp_path / "page.html"
    argv = [*flags[: at + 1], str(checkpoints / "step_*.pt"), *flags[at + 2 :], "--html", str(page)]
    rows = [r for r in run(argv, capsys) if r["metric"] == "top1"]
    assert [r["samples_seen"] for r in rows] == [64, 128, 640]  # by number, not by name
    assert len({r["value"] for r in rows}) > 1
    assert "Top-1 over samples seen" in page.read_text()
    argv[at + 1] = str(checkpoints)
    assert [r["value"] for r in run(argv, capsys) if r["metric"] == "top1"] == [r["value"] for r in rows]
    argv[at + 1] = str(checkpoints / "nothing_*.pt")
    assert main(argv) == 2


def test_results_are_kept_and_not_made_twice(
    flags: list[str], checkpoints: Path, capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clip_linear_eval import scores

    computed = []
    original = scores.score
    monkeypatch.setattr(scores, "score", lambda *a, **k: computed.append(1) or original(*a, **k))
    for name in ("rows.json", "rows.jsonl", "rows.csv"):
        out = tmp_path / name
        computed.clear()
        first = run([*flags, "--out", str(out)], capsys)
        again = run([*flags, "--out", str(out), "--batch-size", "3"], capsys)
        assert len(computed) == 1
        same = ("metric", "value", "n", "ci_low", "ci_high", "errors", "eval_id", "samples_seen")
        assert [[r[k] for k in same] for r in again] == [[r[k] for k in same] for r in first]
        if name != "rows.json":
            continue
        run([*flags, "--out", str(out), "--limit", "5"], capsys)
        run([*flags, "--out", str(out), "--templates", "1"], capsys)
        other = [*flags, "--out", str(out)]
        other[other.index("--pretrained") + 1] = str(checkpoints / "step_10.pt")
        run(other, capsys)
        assert len(computed) == 4
        kept = load_rows(out)
        assert len(kept) == 16 and len({r["eval_id"] for r in kept}) == 4
    assert read_rows(tmp_path / "rows.csv")[0]["value"] == first[0]["value"]


def test_a_result_file_of_another_kind_is_not_overwritten(flags: list[str], tmp_path: Path, capsys) -> None:
    (tmp_path / "notes.json").write_text('{"mine": 1}')
    assert main([*flags, "--out", str(tmp_path / "notes.json")]) == 2
    assert json.loads((tmp_path / "notes.json").read_text()) == {"mine": 1}
    assert "no list of rows" in capsys.readouterr().err


def test_predictions_and_paired_comparison(flags: list[str], checkpoints: Path, tmp_path: Path, capsys) -> None:
    pytest.importorskip("pyarrow")
    import pandas as pd

    for suffix in ("parquet", "csv"):
        one = tmp_path / f"one.{suffix}"
        rows = run([*flags, "--predictions", str(one)], capsys)
        table = pd.read_parquet(one) if suffix == "parquet" else pd.read_csv(one)
        assert len(table) == rows[0]["n"] and table["correct"].sum() == rows[0]["correct"]
        assert table["correct5"].sum() == rows[1]["correct"]
        assert set(table["name"]) == set(NAMES)
        other = [*flags, "--compare", str(one)]
        other[other.index("--pretrained") + 1] = str(checkpoints / "step_10.pt")
        rows = run(other, capsys)
        difference = rows[-1]
        assert difference["metric"] == "top1_difference"
        assert difference["value"] == pytest.approx(rows[0]["value"] - table["correct"].mean())
        assert difference["only_this"] - difference["only_other"] == rows[0]["correct"] - table["correct"].sum()
        assert 0 < difference["p_mcnemar"] <= 1 and difference["n"] == len(table)
    assert main([*flags, "--compare", str(tmp_path / "missing.csv")]) == 2
    assert main([*flags, "--predictions", str(tmp_path / "x.xlsx")]) == 2


def test_per_class_table(flags: list[str], tmp_path: Path, capsys) -> None:
    rows = run([*flags, "--per-class", str(tmp_path / "classes.csv")], capsys)
    with open(tmp_path / "classes.csv") as f:
        table = list(csv.DictReader(f))
    assert [line["name"] for line in table] == NAMES
    assert sum(int(line["correct"]) for line in table) == rows[0]["correct"]
    mean = sum(float(line["recall"]) for line in table) / len(table)
    assert mean == pytest.approx(next(r["value"] for r in rows if r["metric"] == "mean_per_class_recall"))


def test_page_stands_alone(flags: list[str], folder: Path, tmp_path: Path, capsys) -> None:
    broken = shutil.copytree(folder, tmp_path / "<b>set")
    (broken / "0001" / "0.jpg").write_bytes(b"")
    argv = [*flags, "--html", str(tmp_path / "page.html"), "--on-error", "skip"]
    argv[argv.index("--dataset") + 1] = str(broken)
    rows = run(argv, capsys)
    page = (tmp_path / "page.html").read_text()
    assert f"{100 * rows[0]['value']:.2f} %" in page and f"{100 * rows[0]['ci_low']:.2f} %" in page
    assert "data:image/jpeg;base64," in page and "Most confused pairs" in page and "<svg" in page
    assert "0001/0.jpg" in page and "1 samples could not be read" in page
    assert "<b>set" not in page and "&lt;b&gt;set" in page
    for word in ("http://", "https://", "<script", "<link"):
        assert word not in page


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLIP_LINEAR_CACHE", str(tmp_path / "file" / "cache"))
    assert len(run(flags, capsys)) == 4


def test_formats_and_topk(flags: list[str], capsys) -> None:
    assert main([*flags, "--format", "clip-benchmark"]) == 0
    (made,) = json.loads(capsys.readouterr().out)
    rows = run([*flags, "--topk", "1", "3", "7", "99"], capsys)
    assert made["metrics"]["acc1"] == rows[0]["value"] and made["task"] == "zeroshot_classification"
    assert [r["metric"] for r in rows[:3]] == ["top1", "top3", "top7"]
    assert rows[2]["value"] == 1.0
    assert main([*flags, "--topk", "0"]) == 2


def test_hierarchy(flags: list[str], tmp_path: Path, capsys) -> None:
    (tmp_path / "tree.txt").write_text("\n".join(f"all {i}" for i in range(7)))
    rows = {r["metric"]: r for r in run([*flags, "--hierarchy", str(tmp_path / "tree.txt")], capsys)}
    assert rows["top1_hierarchical"]["value"] == rows["top1"]["value"]
    assert rows["mean_lca_height"]["value"] == pytest.approx(1 - rows["top1"]["value"])
    assert rows["mean_lca_height"]["unit"] == "levels"


def test_tasks_and_groups(flags: list[str], folder: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(folder, tmp_path / "data" / "tiny")
    (tmp_path / "mine.toml").write_text(
        '[tasks.tiny-1]\nversion = 3\ndataset = "data/tiny"\ntemplates = "1"\n'
        '[tasks.tiny-own]\ndataset = "data/tiny"\n[groups]\nboth = ["tiny-1", "tiny-own"]\nall = ["both", "tiny-1"]\n'
    )
    argv = flags[: flags.index("--dataset")]
    rows = [r for r in run([*argv, "--dataset", "all", "--tasks", str(tmp_path / "mine.toml")], capsys)]
    top = [r for r in rows if r["metric"] == "top1"]
    assert [(r["dataset"], r["templates"], r["task_version"]) for r in top] == [
        ("tiny-1", "1", 3),
        ("tiny-own", "zeroshot_classification_templates.txt", None),
    ]
    for name in ("imagenet-robustnes", "bot"):
        assert main([*argv, "--dataset", name, "--tasks", str(tmp_path / "mine.toml")]) == 2
    assert "did you mean 'imagenet-robustness'" in capsys.readouterr().err
    (tmp_path / "bad.toml").write_text('[tasks.x]\ndataset = "."\nnmaes = "1"\n')
    assert main([*argv, "--dataset", "x", "--tasks", str(tmp_path / "bad.toml")]) == 2
    assert "nmaes" in capsys.readouterr().err
    (tmp_path / "loop.toml").write_text('[groups]\na = ["b"]\nb = ["a"]\n')
    assert main([*argv, "--dataset", "a", "--tasks", str(tmp_path / "loop.toml")]) == 2


def test_built_in_tasks_name_lists_and_templates_that_exist() -> None:
    from clip_linear_eval.classnames import load_names
    from clip_linear_eval.prompts import load_templates
    from clip_linear_eval.tasks import find_tasks

    tasks = find_tasks(["imagenet-all", "imagenet-22k", "imagenet-21k-p", "imagenet-1k-real"], [], Path("root"))
    assert len(tasks) == 9 and all(t.dataset.startswith("root/") for t in tasks)
    for task in tasks:
        assert task.templates is None or load_templates(task.templates).templates
        assert task.classnames is None or load_names(task.classnames).names


def test_a_function_makes_the_model(flags: list[str], config: Path, weights: Path, tmp_path: Path, monkeypatch, capsys):
    expected = run(flags, capsys)
    (tmp_path / "my_models.py").write_text(
        "from clip_linear.factory import create_model_and_transforms, get_tokenizer\n"
        f"def make():\n    m, _, p = create_model_and_transforms({str(config)!r}, pretrained={str(weights)!r})\n"
        f"    return m, p, get_tokenizer({str(config)!r})\ndef wrong():\n    return 1\n"
    )
    monkeypatch.chdir(tmp_path)
    argv = ["eval", "--dataset", flags[-1], "--model"]
    rows = run([*argv, "my_models:make"], capsys)
    assert [r["value"] for r in rows] == [r["value"] for r in expected]
    for bad in ("my_models:mak", "my_modells:make", "my_models:wrong"):
        assert main([*argv, bad]) == 2
        assert bad in capsys.readouterr().err
    sys.modules.pop("my_models", None)


def test_a_run_folder_is_a_model(flags: list[str], config: Path, clip, tmp_path: Path, capsys) -> None:
    """As training writes it: config and weights of the last checkpoint beside a folder of checkpoints."""
    import torch
    from safetensors.torch import save_file

    expected = run(flags, capsys)
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    model_cfg = json.loads(config.read_text())
    (run_dir / "open_clip_config.json").write_text(json.dumps({"model_cfg": model_cfg, "preprocess_cfg": {}}))
    (run_dir / "config.toml").write_text('run_id = "tiny-1k-s3-abc"\nmodel = "ViT-tiny"\n[openclip]\nseed = 3\n')
    state = clip[0].state_dict()
    torch.save({"state_dict": state, "samples_seen": 99}, run_dir / "checkpoints" / "step_000000099.pt")
    argv = ["eval", "--dataset", flags[-1]]
    assert main([*argv, "--model", f"local-dir:{run_dir}"]) == 2  # OpenCLIP would go on with random weights
    save_file(state, run_dir / "open_clip_model.safetensors")
    for way in (
        ["--model", f"local-dir:{run_dir}"],
        ["--pretrained", str(run_dir)],
        ["--pretrained", f"local-dir:{run_dir}"],
        ["--pretrained", str(run_dir / "checkpoints" / "step_000000099.pt")],
        ["--pretrained", str(run_dir / "checkpoints")],
        ["--pretrained", str(run_dir / "open_clip_model.safetensors"), "--model", str(config)],
        ["--pretrained", str(run_dir), "--model", str(config)],
    ):
        rows = run([*argv, *way], capsys)
        assert [r["value"] for r in rows] == [r["value"] for r in expected], way
        if "--model" not in way:
            assert (rows[0]["run_id"], rows[0]["model"], rows[0]["seed"]) == ("tiny-1k-s3-abc", "ViT-tiny", 3)
        if "checkpoints" in way[-1]:
            assert rows[0]["samples_seen"] == 99


def test_a_linear_checkpoint_is_not_taken_for_a_softmax_one(config: Path, folder: Path, tmp_path: Path, capsys) -> None:
    import torch

    from clip_linear.factory import create_model

    linear = create_model(f"{config}+elu+elu")
    torch.save({"state_dict": linear.state_dict()}, tmp_path / "linear.pt")
    argv = ["eval", "--dataset", str(folder), "--pretrained", str(tmp_path / "linear.pt"), "--model"]
    assert main([*argv, str(config)]) != 0
    capsys.readouterr()
    rows = run([*argv, f"{config}+elu+elu"], capsys)
    assert (rows[0]["image_variant"], rows[0]["text_variant"]) == ("elu", "elu")


def test_plain_table_in_a_pipe(flags: list[str], capsys) -> None:
    assert main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["model", "dataset", "metric", "value"] and len(lines) == 5
    assert "\x1b" not in "".join(lines)
