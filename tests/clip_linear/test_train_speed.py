"""Rates in the rows, and the smaller promises of the trainer: guards, schedules, losses beyond CLIP."""

import json

import pytest
import torch

from clip_linear.train.guards import Guards
from clip_linear.train.loop import train
from clip_linear.train.speed import macs_per_sample, tokens_per_sample
from tests.clip_linear.train_helpers import MINI, FakeLoader, argv, config, rows, write_model


def test_rates(tmp_path):
    cfg = config(tmp_path, peak_tflops=1.0)
    train(cfg, make_loader=FakeLoader)
    last = json.loads((cfg.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    tokens = 4 * 4 + 1 + 8  # patches of 8 at 32 px, the class token, the context
    assert last["tokens_per_s"] == pytest.approx(tokens * last["samples_per_s"])
    assert last["mfu"] == pytest.approx(6 * macs_per_sample(cfg) * last["samples_per_s"] / 1e12)
    assert 0 <= last["data_wait_frac"] <= 1 and last["rss_gib"] > 0.1


def test_towers_without_a_grid_have_no_token_count():
    model = torch.nn.Module()
    model.visual = torch.nn.Linear(1, 1)
    assert tokens_per_sample(model) is None


def test_spikes_and_clamps_are_counted(caplog):
    guards = Guards(10)
    for step in range(1, 300):
        loss = 2.0 + 0.01 * (step % 7)
        guards.look(step, 9.0 if step == 250 else loss, 1.0, 100.0 if step > 290 else 14.0, False)
    assert guards.counts() == {"bad_steps": 0, "loss_spikes": 1, "clamped_steps": 9}
    assert "step 250: loss spike" in caplog.text and "clamp" in caplog.text
    again = Guards(10)
    again.restore(guards.state())
    assert again.state() == guards.state()


def test_bad_steps_count_within_the_window():
    guards = Guards(2)
    for step in (1, 2, 1500, 1501):
        guards.look(step, float("nan"), 1.0, 14.0, True)
    assert guards.bad_total == 4 and guards.bad == [1500, 1501]


def test_warmup_longer_than_the_run_warns(tmp_path, caplog):
    train(config(tmp_path, warmup=10_000), make_loader=FakeLoader)
    assert "--warmup 10000 is not below the 12 steps" in caplog.text


COCA = MINI | {
    "vision_cfg": MINI["vision_cfg"] | {"attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True},
    "text_cfg": MINI["text_cfg"] | {"embed_cls": True, "output_tokens": True},
    "multimodal_cfg": {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
    "custom_text": True,
}


@pytest.mark.parametrize("accum", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_coca(tmp_path, accum):
    path = tmp_path / "coca_ViT-tiny-test.json"
    path.write_text(json.dumps(COCA))
    cfg = config(tmp_path, model=path, model_suffix="", samples=96 * accum, accum_freq=accum)
    assert train(cfg, make_loader=FakeLoader) == 0
    first, last = rows(cfg.run_dir)[0], rows(cfg.run_dir)[-1]
    assert last["loss"] == pytest.approx(last["contrastive_loss"] + last["caption_loss"], rel=1e-6)
    assert last["caption_loss"] < first["caption_loss"]


def test_distillation(tmp_path):
    import clip_linear

    teacher = clip_linear.create_model(write_model(tmp_path))
    torch.save(teacher.state_dict(), tmp_path / "teacher.pt")
    extra = ["--distill-model", "ViT-tiny-test", "--distill-pretrained", str(tmp_path / "teacher.pt")]
    cfg = config(tmp_path, *extra)
    assert train(cfg, make_loader=FakeLoader) == 0
    last = rows(cfg.run_dir)[-1]
    assert last["loss"] == pytest.approx(last["contrastive_loss"] + last["distill_loss"], rel=1e-6)


@pytest.mark.parametrize(
    "extra",
    [
        ["--grad-checkpointing"],
        ["--deterministic"],
        ["--precision", "pure_bf16"],
        ["--precision", "bf16"],
        ["--lock-image", "--lock-image-unlocked-groups", "1"],
        ["--force-custom-text", "--force-quick-gelu"],
        ["--skip-scheduler"],
        ["--opt", "timm/adamw"],
        ["--report-to", "tensorboard"],
    ],
)
def test_flags_train(tmp_path, extra):
    cfg = config(tmp_path, *extra, samples=32)
    assert train(cfg, make_loader=FakeLoader) == 0
    found = rows(cfg.run_dir)
    assert len(found) == 4 and all(row["loss"] > 0 for row in found)
    if extra[0] in ("--grad-checkpointing", "--deterministic"):
        plain = config(tmp_path, samples=32, run_dir=tmp_path / "plain")
        train(plain, make_loader=FakeLoader)
        assert rows(plain.run_dir) == found
    torch.use_deterministic_algorithms(False)


def test_forced_settings_travel_in_the_folder(tmp_path):
    """local-dir: builds what was trained, also when flags changed the config."""
    import open_clip

    import clip_linear

    cfg = config(tmp_path, "--siglip", "--force-quick-gelu", "--force-custom-text", "--force-context-length", "8")
    train(cfg, make_loader=FakeLoader)
    clip_linear.register()
    model = open_clip.create_model(f"local-dir:{cfg.run_dir}")
    assert model.logit_bias is not None and type(model).__name__ == "CustomTextCLIP"
    with open(cfg.run_dir / "open_clip_config.json") as f:
        assert json.load(f)["model_cfg"]["quick_gelu"] is True


@pytest.mark.slow
def test_compiled_training_follows_eager(tmp_path):
    eager, compiled = (
        config(tmp_path, samples=32),
        config(tmp_path, "--torchcompile", samples=32, run_dir=tmp_path / "c"),
    )
    train(eager, make_loader=FakeLoader)
    train(compiled, make_loader=FakeLoader)
    assert argv(tmp_path)
    for a, b in zip(rows(eager.run_dir), rows(compiled.run_dir)):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
