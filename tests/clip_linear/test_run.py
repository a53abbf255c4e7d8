"""The second door: OpenCLIP's own tools run with our models, and each compatibility fix mends what it says."""

import json
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

from clip_linear import compat
from clip_linear.errors import UserError
from clip_linear.run import main, with_known_models
from tests.clip_linear.train_helpers import codes, start_call, write_eval_set, write_model, write_shards


def door(*args):
    return subprocess.run([sys.executable, "-m", "clip_linear.run", *args], capture_output=True, text=True, timeout=280)


def flags(tmp_path, shards, **more):
    values = {
        "model": write_model(tmp_path) + "+mala+elu",
        "train-data": shards,
        "train-num-samples": 48,
        "dataset-type": "webdataset",
        "batch-size": 8,
        "epochs": 1,
        "workers": 0,
        "precision": "fp32",
        "device": "cpu",
        "warmup": 2,
        "logs": tmp_path / "logs",
        "name": "x",
    } | more
    return [part for k, v in values.items() for part in (f"--{k}", str(v))]


@pytest.mark.slow
def test_openclips_trainer_on_shards_with_imagenet_evaluation(tmp_path):
    """Real shards under the installed webdataset, and zero-shot evaluation under the installed numpy."""
    shards = write_shards(tmp_path / "train")
    squares = write_eval_set(tmp_path / "squares")
    args = flags(tmp_path, shards, **{"imagenet-val": squares, "zeroshot-frequency": 1})
    done = door("open_clip_train.main", *args)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (tmp_path / "logs" / "x" / "checkpoints" / "results.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    assert 0 <= results[-1]["imagenet-zeroshot-val-top1"] <= 1
    saved = torch.load(tmp_path / "logs" / "x" / "checkpoints" / "epoch_1.pt", weights_only=True)
    assert any("clip_linear_spec" in key for key in saved["state_dict"])
    again = door("open_clip_train.main", *args)
    assert again.returncode == 1 and "already exists" in again.stdout  # OpenCLIP itself would end with 0


@pytest.mark.slow
def test_openclips_profiler(tmp_path):
    out = tmp_path / "profile.csv"
    done = door("open_clip_train.profiler", "--model", "ViT-S-32+mala+elu", "--results-file", str(out))
    assert done.returncode == 0 and "Error profiling" not in done.stdout, done.stdout + done.stderr[-2000:]
    from clip_linear.names import model_config
    from clip_linear.profile import profile

    header, row = (line.split(",") for line in out.read_text().splitlines())
    found = dict(zip(header, row))
    assert float(found["mparams"]) == pytest.approx(
        profile(model_config("ViT-S-32+mala+elu")[1]).n_params_total / 1e6, abs=0.01
    )


def test_json_configs_become_names(tmp_path):
    path = write_model(tmp_path)
    several = ["--model", f"{path}+elu", path, "--output", "rows.json", f"--model={path}", "--out=a.json"]
    named = ["--model", "ViT-tiny-test+elu", "ViT-tiny-test", "--output", "rows.json", "--model=ViT-tiny-test"]
    assert with_known_models(several) == [*named, "--out=a.json"]


def test_unknown_modules_are_a_users_mistake():
    with pytest.raises(UserError, match="open_clip_trian"):
        main(["open_clip_trian.main"])
    assert main(["-h"]) == 0 and main([]) == 2


def test_exit_codes(monkeypatch):
    for result, code in ((None, 0), (0, 0), (-1, 1), (3, 3), ({}, 0)):
        module = types.ModuleType("some_tool")
        module.__file__, module.main = "some_tool.py", lambda args, result=result: result
        module.__spec__ = types.SimpleNamespace()
        monkeypatch.setitem(sys.modules, "some_tool", module)
        assert main(["some_tool", "--x"]) == code


def test_fix_accuracy():
    """Without the fix numpy ≥ 2.4 raises; with it the counts are those of the definition."""
    from open_clip_train import zero_shot

    vars(zero_shot).pop("float", None)
    logits, target = torch.tensor([[3.0, 1, 2], [0, 5, 1], [9, 1, 8]]), torch.tensor([2, 1, 0])
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        with pytest.raises(TypeError):
            zero_shot.accuracy(logits, target, (1, 2))
    compat.accuracy_on_new_numpy()
    assert zero_shot.accuracy(logits, target, (1, 2)) == [2.0, 3.0]


def test_fix_webdataset(tmp_path):
    """Without the fix OpenCLIP's reader ends at the first shard of a newer webdataset."""
    from open_clip_train import data

    write_shards(tmp_path, shards=2, per_shard=4)
    sources = [{"url": str(p)} for p in sorted(tmp_path.glob("*.tar"))]
    compat.no_end_of_shard_marker()
    assert len(list(data.tarfile_to_samples_nothrow(sources))) == 8
    newer = getattr(data.tar_file_expander, "func", None)
    if newer is not None:
        data.tar_file_expander, fixed = newer, data.tar_file_expander
        try:
            with pytest.raises(KeyError, match="fname"):
                list(data.tarfile_to_samples_nothrow(sources))
        finally:
            data.tar_file_expander = fixed


def _ddp(path, fixed):
    """In another process: DDP as OpenCLIP calls it."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    if fixed:
        compat.ddp_on_cpu()
        compat.ddp_on_cpu()
    model = torch.nn.Linear(2, 2)
    torch.nn.parallel.DistributedDataParallel(model, device_ids=[torch.device("cpu")])(
        torch.ones(1, 2)
    ).sum().backward()


def test_fix_ddp_on_cpu(tmp_path):
    assert codes([start_call(_ddp, str(tmp_path / "a"), True)]) == [0]
    assert codes([start_call(_ddp, str(tmp_path / "b"), False)]) == [1]


def test_fixes_are_idempotent():
    from open_clip_train import data

    compat.apply("open_clip_train.main")
    first = data.tar_file_expander
    compat.apply("open_clip_train.main")
    assert data.tar_file_expander is first
