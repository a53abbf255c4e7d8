"""What an evaluation reads and writes beside its data: a moved run's vocabulary, a table that stands already."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
import torch

from clip_linear.errors import UserError
from clip_linear.train.config import resolve
from clip_linear_eval.models import load
from clip_linear_eval.saved import save_rows


def test_a_moved_run_brings_its_vocabulary(tmp_path):
    from open_clip.tokenizer import default_bpe

    from clip_linear.factory import create_model
    from clip_linear.train.build import write_open_clip_config

    there = tmp_path / "there"
    there.mkdir()
    merges = gzip.decompress(Path(default_bpe()).read_bytes()).decode().split("\n")
    (there / "small.txt.gz").write_bytes(gzip.compress("\n".join(merges[: 1 + 600 - 514]).encode(), mtime=0))
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8},
        "text_cfg": {"context_length": 12, "vocab_size": 600, "width": 16, "heads": 2, "layers": 1}
        | {"tokenizer_kwargs": {"bpe_path": "small.txt.gz"}},
    }
    (there / "ViT-moved.json").write_text(json.dumps(config))
    name = f"{there / 'ViT-moved.json'}+elu"
    run = tmp_path / "run"
    run.mkdir()
    model = create_model(name)
    write_open_clip_config(
        run / "open_clip_config.json",
        resolve(["--model", name, "--train-data", "x.tar", "--samples", "8", "--batch-size", "4"]),
        model,
    )
    from safetensors.torch import save_file

    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, run / "open_clip_model.safetensors")
    wanted = load(None, str(run)).tokenizer(["grinning face"])
    shutil.rmtree(there)
    moved = shutil.move(run, tmp_path / "elsewhere")
    assert torch.equal(load(None, str(moved)).tokenizer(["grinning face"]), wanted)


def test_a_foreign_table_is_not_mixed_with_results(tmp_path):
    table = tmp_path / "mine.csv"
    table.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"mine\.csv"):
        save_rows(table, [{"dataset": "d", "metric": "top1", "value": 0.5}])
    assert table.read_text() == "a,b\n1,2\n"
