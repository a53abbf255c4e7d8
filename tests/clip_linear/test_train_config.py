"""The record of a run: OpenCLIP's flags and ours, what the run id hashes, and the two round trips."""

import json
import subprocess
import sys

import pytest

from clip_linear.errors import UserError
from clip_linear.train.config import build_parser, from_toml, resolve
from clip_linear.train.flags import HONOURED, defaults, our_flags

BASE = ["--model", "ViT-S-16+mala", "--train-data", "shards/{0..9}.tar", "--samples", "6400", "--warmup", "5"]
MINI = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 16, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 1, "layers": 1},
}


def test_our_flags_are_frozen():
    """Adding a flag is deliberate: it changes this list."""
    frozen = """samples run_dir eval_data save_every_steps save_every_samples save_every_minutes keep_last
        keep_every_samples max_bad_steps ema_decay fsdp deterministic no_fused_optimizer openclip_accum_scale
        dist_timeout_s peak_tflops dry_run caption_key filter max_image_pixels max_aspect shuffle_buffer_mib
        max_fault_rate data_timeout_s shard_cache attention_transfer"""
    assert sorted(our_flags()) == sorted(frozen.split())


def test_openclip_defaults_are_openclips():
    from open_clip_train.params import parse_args

    theirs = vars(parse_args(["--model", "ViT-S-16", "--train-data", "x.tar"]))
    ours = resolve(["--model", "ViT-S-16", "--train-data", "x.tar", "--samples", "64"]).openclip
    different = {k for k in theirs if ours[k] != theirs[k]}
    assert different == {"zeroshot_frequency"}  # 2 epochs, written "2epochs"
    assert set(HONOURED) <= set(theirs)


@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["--filter", "similarity>=0.3", "--filter", "width>32", "--eval-data", "a", "b c"],
        [
            "--force-image-size",
            "64",
            "96",
            "--aug-cfg",
            "scale=(0.9,1.0)",
            "use_timm=True",
            "--image-mean",
            "0",
            "0",
            "0",
        ],
        ["--zeroshot-frequency", "500steps", "--lr", "3e-4", "--siglip", "--name", 'a "quoted" \\ name'],
        ["--opt", "timm/lion", "--lr", "1e-4", "--grad-clip-norm", "1"],
    ],
)
def test_round_trips(extra):
    config = resolve([*BASE, *extra], world_size=2)
    assert resolve(config.to_argv(), world_size=2) == config
    assert from_toml(config.to_toml()) == config
    assert from_toml(config.to_toml()).run_id == config.run_id


def test_run_id_hashes_numbers_only():
    run_id = resolve(BASE).run_id
    assert run_id.startswith("ViT-S-16+mala-6.4k-s0-")
    same = "--workers 0 --device cpu --logs elsewhere --name x --log-every-n-steps 1 --save-every-steps 5 --keep-last 9"
    same += " --resume latest --eval-data a --zeroshot-frequency 1steps --dist-backend gloo"
    assert resolve([*BASE, *same.split()]).run_id == run_id
    assert resolve([*BASE, "--batch-size", "32"], world_size=2).run_id == run_id
    by_epochs = [*BASE[:4], "--train-num-samples", "3200", "--epochs", "2", "--warmup", "5"]
    assert resolve(by_epochs).run_id == run_id
    changes = ["--seed 1", "--lr 1e-4", "--batch-size 32", "--samples 6401", "--siglip", "--precision fp32", "--wd 0.1"]
    changes += ["--model ViT-S-16+elu", "--train-data other.tar", "--filter a>1", "--accum-freq 2", "--warmup 6"]
    ids = {resolve([*BASE, *change.split()]).run_id for change in changes}
    assert len(ids) == len(changes) and run_id not in ids


def test_json_config_counts_by_content(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    mini = MINI | {"text_cfg": MINI["text_cfg"] | {"tokenizer_kwargs": {"bpe_path": "vocab.gz"}}}
    ids = []
    for folder, vocabulary in (("a", b"1"), ("b", b"1"), ("b", b"22")):
        (tmp_path / folder / "ViT-mini.json").write_text(json.dumps(mini))
        (tmp_path / folder / "vocab.gz").write_bytes(vocabulary)
        argv = ["--model", f"{tmp_path}/{folder}/ViT-mini.json+elu", *BASE[2:]]
        ids.append(resolve(argv).run_id)
    assert ids[0] == ids[1] != ids[2]
    (tmp_path / "b" / "vocab.gz").unlink()
    with pytest.raises(UserError, match="bpe_path"):
        _ = resolve(argv).run_id


def test_budget_is_exact_to_one_global_batch():
    config = resolve([*BASE, "--batch-size", "10", "--accum-freq", "3"], world_size=2)
    assert config.global_batch == 60 and config.steps == 107
    assert 0 <= config.steps * config.global_batch - config.budget < config.global_batch


@pytest.mark.parametrize(
    "extra, words",
    [
        (["--horovod"], "--horovod is not honoured"),
        (["--val-data", "x"], "--eval-data"),
        (["--dataset-type", "csv"], "clip-linear data write"),
        (["--model", "ViT-S-61"], "did you mean 'ViT-S-16'"),
        (["--model", "ViT-S-16+mela"], "did you mean 'mala'"),
        (["--bacth-size", "3"], "did you mean '--batch-size'"),
        (["--local-loss"], "--gather-with-grad"),
        (["--samples", "0"], "above 0"),
        (["--samples", "1.5"], "--samples"),
        (["--zeroshot-frequency", "2hours"], "--zeroshot-frequency"),
        (["--batch-size", "0"], "at least 1"),
        (["--opt", "sgd"], "timm/NAME"),
        (["--lr-scheduler", "linear"], "cosine"),
        (["0.tar", "1.tar"], "quote"),
    ],
)
def test_mistakes_are_one_line(extra, words):
    with pytest.raises(UserError) as caught:
        resolve([*BASE, *extra])
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_resolving_is_light():
    code = f"import sys; from clip_linear.train.config import resolve; resolve({BASE!r}); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "False", out.stderr


def test_every_flag_has_help():
    assert all(action.help for action in build_parser()._actions if action.dest not in ("aug_cfg",))
    assert "clip-linear train" in build_parser().format_help()
    assert set(defaults()) >= set(our_flags())
