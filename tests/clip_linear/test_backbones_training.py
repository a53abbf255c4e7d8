"""CLIP models with the backbones in the trainer, on a few real emoji."""

import json

import pytest
import torch

from clip_linear.__main__ import main
from tests.clip_linear.backbone_helpers import TOYS, clip_config
from tests.clip_linear.train_helpers import rows, weights


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """48 emoji with their captions, in one shard."""
    from clip_linear.emoji.concepts import load_concepts
    from clip_linear.emoji.pairs import split_pairs, write_shards
    from clip_linear.emoji.tiles import Tiles

    out = tmp_path_factory.mktemp("emoji") / "train"
    write_shards(split_pairs(load_concepts())[0][:48], Tiles(), out, 48)
    return out / "00000.tar"


def train(folder, toy, shards, *extra, **flags):
    """A run of 10 steps with this tower; its folder."""
    path = folder / f"CLIP-{toy}.json"
    path.write_text(json.dumps(clip_config(toy)))
    values = {
        "model": path, "train-data": shards, "samples": 160, "batch-size": 16, "lr": 1e-3, "warmup": 1, "workers": 0,
        "precision": "fp32", "device": "cpu", "run-dir": folder / toy, "log-every-n-steps": 1,
    } | {k.replace("_", "-"): v for k, v in flags.items()}  # fmt: skip
    assert main(["train", *extra, *(part for k, v in values.items() for part in (f"--{k}", str(v)))]) == 0
    return folder / toy


@pytest.mark.parametrize("toy", TOYS)
def test_each_family_trains(tmp_path, toy, shards):
    run = train(tmp_path, toy, shards)
    losses = [r["loss"] for r in rows(run) if "loss" in r]
    assert len(losses) == 10 and sum(losses[-3:]) / 3 < losses[0]
    state = weights(run, 10)
    assert all(torch.isfinite(v).all() for v in state.values() if v.is_floating_point())


def test_statistics_move_once_with_accumulation_and_checkpointing(tmp_path, shards):
    """Every batch passes twice with --accum-freq, and blocks twice with --grad-checkpointing."""
    flags = {"samples": 64, "batch-size": 16}
    once = train(tmp_path, "toy_mavit", shards, **flags)
    (tmp_path / "more").mkdir()
    more = train(tmp_path / "more", "toy_mavit", shards, "--grad-checkpointing", **flags | {"accum-freq": 2})
    a, b = weights(once, 4), weights(more, 2)
    counters = [k for k in a if k.endswith("num_batches_tracked")]
    assert counters and all(a[k] == b[k] == 4 for k in counters)
    stem = "visual.trunk.patch_embed.proj.1.running_mean"
    assert not torch.equal(a[stem], torch.zeros_like(a[stem]))


def test_still_statistics():
    from clip_linear.train.statistics import still_statistics

    model = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3).eval())
    x = torch.randn(4, 3, 5, 5) + 1
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with still_statistics(model):
        inside = model(x)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(model(x), inside)
    assert model.state_dict()["0.num_batches_tracked"] == 1 and model[1].track_running_stats
