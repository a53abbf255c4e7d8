"""Mistakes at the door: one line, the right exit code, nothing replaced that is not ours to replace."""

import json
import os
import subprocess
import sys

import pytest
import torch

from clip_linear.__main__ import main
from clip_linear.errors import UserError
from clip_linear.factory import create_model
from clip_linear.files import write_text
from clip_linear.names import model_config
from clip_linear.profile import profile
from clip_linear.train.build import build
from clip_linear.train.config import resolve
from clip_linear.train.flags import OTHER_NAMES, build_parser

GOOD = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2, "layers": 1},
}


def command(*args, **kwargs):
    run = [sys.executable, "-m", "clip_linear", *args]
    return subprocess.run(run, capture_output="stdout" not in kwargs, text=True, **kwargs)


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ("", "embed_dim", "x"),
        ("", "embed_dim", -4),
        ("vision_cfg", "patch_size", 0),
        ("vision_cfg", "width", 50),
        ("vision_cfg", "layers", 1.5),
        ("text_cfg", "heads", 3),
        ("", "text_cfg", []),
    ],
)
def test_a_wrong_size_in_a_config_is_one_line(tmp_path, where, key, value):
    config = json.loads(json.dumps(GOOD))
    (config[where] if where else config)[key] = value
    path = tmp_path / "ViT-wrong.json"
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"ViT-wrong\.json"):
        model_config(str(path))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["fit"], "required: ROWS"),
        (["list", "--jsn"], "did you mean --json?"),
        (["eval", "--dataset", "x", "--batch-size", "many"], "'many'"),
        (["launch", "plam", "x.toml"], "'plam'"),
        (["train", "--modle", "x"], "did you mean '--model'"),
        (["train", "--learning_rate=1e-3"], "here it is --lr"),
    ],
)
def test_a_wrong_flag_is_one_line(capsys, args, words):
    assert main(args) == 2
    err = capsys.readouterr().err
    assert words in err and "--help" in err and err.count("\n") == 1


def test_list_takes_a_variant(capsys):
    assert main(["list", "affine_eq7"]) == 0
    assert "affine_eq7" in capsys.readouterr().out
    assert main(["list", "nothing"]) == 2 and main(["list", "nothing", "at all"]) == 2


def test_an_image_without_a_patch_is_refused():
    with pytest.raises(UserError, match="holds no patch"):
        profile(model_config("ViT-B-16")[1], 7)


@pytest.mark.parametrize(
    "flags", [("--lr", "nan"), ("--lr", "-1"), ("--beta1", "2"), ("--warmup", "-1"), ("--grad-clip-norm", "nan")]
)
def test_numbers_that_cannot_train_are_refused(flags):
    base = ["--model", "ViT-S-32", "--train-data", "x.tar", "--samples", "8", "--batch-size", "4", "--beta2", "0.9"]
    first = [] if "--beta1" in flags else ["--beta1", "0.9"]
    with pytest.raises(UserError, match=flags[0]):
        resolve([*base, *first, *flags])


def test_only_regular_files_are_replaced(tmp_path):
    fifo, folder = tmp_path / "fifo", tmp_path / "folder"
    os.mkfifo(fifo)
    folder.mkdir()
    for path in (fifo, folder):
        with pytest.raises(OSError, match="not a regular file"):
            write_text(path, "x")
    assert fifo.is_fifo() and not list(folder.iterdir()) and len(list(tmp_path.iterdir())) == 2


def test_a_path_that_cannot_be_written_is_one_line(tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text("x,y\n1,1\n2,.9\n4,.8\n8,.7\n")
    for out in (rows, rows / "below"):
        done = command("fit", str(rows), "--x", "x", "--y", "y", "--out", str(out))
        assert done.returncode == 2 and len(done.stderr.splitlines()) <= 2, done.stderr
        assert "Traceback" not in done.stderr
    assert rows.read_text().startswith("x,y\n1,1\n")


def test_help_into_a_full_device_is_one_line():
    with open("/dev/full", "w") as full:
        done = command("--help", stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "space" in done.stderr
    assert command().returncode == 2


@pytest.mark.parametrize("where", ["", "vision_cfg", "text_cfg"])
def test_a_misspelt_key_of_a_config_is_named(tmp_path, where):
    config = json.loads(json.dumps(GOOD))
    (config[where] if where else config)["widht"] = 16
    path = tmp_path / f"ViT-misspelt-{where or 'top'}.json"
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="'widht'"):
        create_model(str(path))
    flags = ["--model", str(path), "--train-data", "x.tar", "--samples", "8", "--batch-size", "4", "--lr", "1e-3"]
    with pytest.raises(UserError, match="'widht'"):
        build(resolve(flags), torch.device("cpu"))


def test_other_names_lead_to_flags_that_there_are():
    known = {option for action in build_parser()._actions for option in action.option_strings}
    assert set(OTHER_NAMES.values()) <= known and not {f"--{name}" for name in OTHER_NAMES} & known
