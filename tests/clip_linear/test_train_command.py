"""``clip-linear train`` as a user meets it: real shards, evaluation inside, mistakes in one line."""

import json
import subprocess
import sys

import pytest

from clip_linear.__main__ import main
from tests.clip_linear.train_helpers import argv, command, rows, write_eval_set, write_shards


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return {"train": write_shards(folder / "train"), "eval": write_eval_set(folder / "eval" / "squares")}


def test_trains_evaluates_and_leaves_a_whole_folder(tmp_path, data):
    flags = {"train-data": data["train"], "samples": 128, "batch-size": 16}
    extra = ["--eval-data", data["eval"], "--zeroshot-frequency", "4steps"]
    done = command("train", *argv(tmp_path, *extra, **flags))  # the one that really starts another process
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    names = {p.name for p in run.iterdir()}
    assert names >= {"config.toml", "env.json", "metrics.jsonl", "checkpoints", "eval.json", "attempts.jsonl"}
    assert names >= {"state.json", "done.json", "open_clip_config.json", "open_clip_model.safetensors"}
    top1 = next(r for r in json.loads((run / "eval.json").read_text()) if r["metric"] == "top1")
    assert top1["n"] == 8 and top1["samples_seen"] == 128 and top1["image_variant"] == "elu"
    assert top1["gmacs"] > 0 and top1["gmacs_total"] == top1["gmacs"] * 128
    assert top1["n_params_total"] > top1["n_params_vision"] > 0
    assert [json.loads(line)["step"] for line in (run / "evals.jsonl").read_text().splitlines()] == [4, 8]
    assert "step 8/8" in done.stderr and "squares/top1" in done.stderr
    done = json.loads((run / "done.json").read_text())
    assert done["samples_seen"] == 128 and done["run_id"] == json.loads((run / "state.json").read_text())["run_id"]
    before = (run / "metrics.jsonl").stat().st_mtime_ns
    assert main(["train", *argv(tmp_path, *extra, **flags)]) == 0
    assert (run / "metrics.jsonl").stat().st_mtime_ns == before


def test_evaluation_does_not_touch_training(tmp_path, data):
    flags = {"train-data": data["train"], "samples": 96, "batch-size": 16, "force-patch-dropout": 0.5}
    with_eval = ["--eval-data", data["eval"], "--zeroshot-frequency", "1steps"]
    for name, extra in (("without", []), ("with", with_eval)):
        assert main(["train", *argv(tmp_path, *extra, run_dir=tmp_path / name, **flags)]) == 0
    assert rows(tmp_path / "with") == rows(tmp_path / "without")


@pytest.mark.parametrize(
    "extra, code, words",
    [
        (["--train-data", "nowhere/*.tar"], 2, "nowhere"),
        (["--eval-data", "nowhere"], 2, "nowhere"),
        (["--pretrained", "laion2b"], 2, "--pretrained 'laion2b'"),
        (["--report-to", "wandb"], 2, "clip-linear[wandb]"),
        (["--report-to", "mlflow"], 2, "mlflow"),
        (["--device", "tpu"], 2, "--device 'tpu'"),
        (["--fsdp"], 2, "--fsdp"),
        (["--opt", "timm/nonsense"], 2, "timm/nonsense"),
        (["--lock-image", "--lock-text"], 2, "--lock-text-freeze-layer-norm"),
        (["--lock-image", "--lock-text", "--lock-text-freeze-layer-norm"], 0, ""),
    ],
)
def test_mistakes(tmp_path, data, capsys, extra, code, words):
    if extra[-1] == "wandb" and _installed("wandb"):
        pytest.skip("wandb is installed here")
    assert main(["train", *argv(tmp_path, *extra, **{"train-data": data["train"]})]) == code
    if code:
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last.startswith("clip-linear train: ") and words in last
        assert not (tmp_path / "run" / "done.json").exists()


def _installed(module):
    import importlib.util

    return importlib.util.find_spec(module) is not None


def test_dry_run_and_help_are_light(tmp_path):
    for args in (["--help"], ["--dry-run", *argv(tmp_path)]):
        code = (
            "import sys; from clip_linear_launch.train import main; code = main(sys.argv[1:]); "
            "sys.exit(code or 3 * ('torch' in sys.modules))"
        )
        out = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
        assert out.returncode == 0, out.stderr
    assert "gmacs" in out.stdout and not (tmp_path / "run").exists()


def test_a_folder_without_config_is_refused(tmp_path, data, capsys):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert main(["train", *argv(tmp_path, **{"train-data": data["train"]})]) == 2
    assert "no config.toml" in capsys.readouterr().err
