"""Attention transfer: what is trained, by which loss, from which weights; and that a killed run continues."""

import copy
import json

import pytest
import torch

import clip_linear
from clip_linear.errors import UserError
from clip_linear.export import export_swapped
from clip_linear.train.loop import train
from clip_linear.train.transfer import AttentionTransfer
from clip_linear_launch import linearize
from tests.clip_linear.train_helpers import (
    MINI,
    FakeLoader,
    codes,
    config,
    global_batch,
    rows,
    same_bits,
    start_ranks,
    weights,
    write_model,
)


@pytest.fixture
def softmax(tmp_path):
    """A softmax model whose attention matters, and its weights in a file."""
    torch.manual_seed(3)
    model = clip_linear.create_model(write_model(tmp_path))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "in_proj_weight" in name:
                p.mul_(6)
    torch.save(model.state_dict(), tmp_path / "softmax.pt")
    return model


def transferred(tmp_path, *extra, **flags):
    given = ["--attention-transfer", "--pretrained", str(tmp_path / "softmax.pt"), *extra]
    return config(tmp_path, *given, **{"model_suffix": "+mala+elu", "lr": 3e-3} | flags)


def test_only_the_swapped_layers_learn(tmp_path, softmax):
    cfg = transferred(tmp_path, samples=320)
    assert train(cfg, make_loader=FakeLoader) == 0
    found, trained, before = rows(cfg.run_dir), weights(cfg.run_dir, cfg.steps), softmax.state_dict()
    assert found[-1]["loss"] < 0.6 * found[0]["loss"]
    for row in found:
        assert row["loss"] == pytest.approx(row["image_attention_loss"] + row["text_attention_loss"], rel=1e-6)
    changed = {k for k in before if not torch.equal(before[k], trained[k])}
    assert changed == {k for k in before if ".attn." in k}


def test_the_loss_is_that_of_each_layer_on_softmaxs_own_input(tmp_path, softmax):
    student = clip_linear.create_model(write_model(tmp_path) + "+mala+elu", pretrained=str(tmp_path / "softmax.pt"))
    plain = copy.deepcopy(softmax)
    images, texts = global_batch(0, 4)
    layers = [n for n, _ in softmax.named_modules() if n.endswith(".attn")]
    seen = {}
    for name in layers:
        plain.get_submodule(name).register_forward_hook(
            lambda m, args, kwargs, out, name=name: seen.__setitem__(name, (args[0], kwargs, out[0])), with_kwargs=True
        )
    plain(images, texts)
    # A body asks the tower which tokens it has; a forward pass has told it.
    student(images, texts)
    want = {"image": [], "text": []}
    for name in layers:
        x, kwargs, target = seen[name]
        got = student.get_submodule(name)(x, x, x, **kwargs)[0]
        errors = (got - target).square().sum((1, 2)) / target.square().sum((1, 2))
        want["image" if name.startswith("visual") else "text"].append(errors.mean().item())
    before = student(images, texts)
    losses = AttentionTransfer(student, softmax)(student, images, texts)
    for tower, errors in want.items():
        assert losses[f"{tower}_attention_loss"].item() == pytest.approx(sum(errors) / len(errors), rel=1e-5)
    for a, b in zip(before, student(images, texts)):  # outside of the loss the hooks do nothing
        assert torch.equal(a, b)


def test_softmax_has_nothing_to_learn(tmp_path, softmax):
    student = clip_linear.create_model(write_model(tmp_path) + "+softmax+softmax")
    student.load_state_dict(softmax.state_dict())
    losses = AttentionTransfer(student, softmax)(student, *global_batch(0, 4))
    assert all(loss.item() < 1e-9 for loss in losses.values())


def test_a_run_folder_is_its_weights_and_linear_weights_are_no_teacher(tmp_path, softmax):
    """And a run that failed before its first step does not keep its folder from the corrected command."""
    teacher = config(tmp_path, model_suffix="", samples=16, run_dir=tmp_path / "teacher")
    assert train(teacher, make_loader=FakeLoader) == 0
    flags = ["--attention-transfer", "--pretrained"]
    good = config(tmp_path, *flags, str(teacher.run_dir), model_suffix="+mala", samples=16)
    assert train(good, make_loader=FakeLoader) == 0
    assert set(rows(good.run_dir)[0]) > {"loss", "image_attention_loss"}
    again = config(tmp_path, *flags, str(good.run_dir), model_suffix="+mala", samples=16, run_dir=tmp_path / "again")
    with pytest.raises(UserError, match="linear attention already"):
        train(again, make_loader=FakeLoader)
    with pytest.raises(UserError, match="linear attention already"):
        export_swapped(write_model(tmp_path) + "+mala", str(good.run_dir), tmp_path / "exported")
    mended = config(tmp_path, *flags, str(teacher.run_dir), model_suffix="+mala", samples=16, run_dir=again.run_dir)
    assert mended.run_id != again.run_id and train(mended, make_loader=FakeLoader) == 0
    with pytest.raises(UserError, match="holds another run"):
        train(again, make_loader=FakeLoader)


@pytest.mark.parametrize("suffix", ["", "+mala"])
def test_weights_of_another_model_are_one_line(tmp_path, softmax, suffix):
    wide = {"vision_cfg": MINI["vision_cfg"] | {"width": 32}, "text_cfg": MINI["text_cfg"] | {"width": 32}}
    (tmp_path / "ViT-wide-test.json").write_text(json.dumps(MINI | wide))
    path = str(tmp_path / "ViT-wide-test.json") + suffix
    cfg = config(tmp_path, "--pretrained", str(tmp_path / "softmax.pt"), model=path, model_suffix="")
    with pytest.raises(UserError, match=r"softmax\.pt' does not fit ViT-wide-test") as error:
        train(cfg, make_loader=FakeLoader)
    assert "\n" not in str(error.value)
    linear = clip_linear.create_model(write_model(tmp_path) + "+mala")
    torch.save(linear.state_dict(), tmp_path / "linear.pt")
    cfg = config(tmp_path, "--pretrained", str(tmp_path / "linear.pt"), model_suffix="", run_dir=tmp_path / "other")
    with pytest.raises(UserError, match=r"add its variants"):
        train(cfg, make_loader=FakeLoader)


def test_two_ranks_are_the_doubled_batch_and_a_stopped_run_continues(tmp_path, softmax):
    whole = transferred(tmp_path, batch_size=16, samples=64, run_dir=tmp_path / "whole")
    assert train(whole, make_loader=FakeLoader) == 0
    two = transferred(tmp_path, batch_size=8, samples=64, run_dir=tmp_path / "two", world_size=2)
    assert codes(start_ranks(2, two.to_argv())) == [0, 0]
    a, b = weights(whole.run_dir, 4), weights(two.run_dir, 4)
    assert all(torch.allclose(a[k], b[k], rtol=0, atol=2e-4) for k in a)
    half = transferred(tmp_path, batch_size=16, samples=64, run_dir=tmp_path / "half", save_every_steps=2)
    assert train(half, make_loader=FakeLoader) == 0
    (half.run_dir / "done.json").unlink()
    (half.run_dir / "checkpoints" / "step_000000004.pt").unlink()
    assert train(half, make_loader=FakeLoader) == 0
    assert same_bits(weights(half.run_dir, 4), a)


@pytest.mark.parametrize(
    ("extra", "flags", "words"),
    [
        (["--grad-checkpointing"], {}, "--grad-checkpointing"),
        (["--lock-image"], {}, "--lock-image"),
        ([], {"accum_freq": 2}, "--accum-freq"),
        ([], {"model_suffix": ""}, "swapped model"),
        ([], {"model_suffix": "+softmax"}, "nothing to teach"),
        ([], {"force_patch_dropout": 0.5}, "--force-patch-dropout 0"),
        (["--pretrained", ""], {}, "--pretrained"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, extra, flags, words):
    with pytest.raises(UserError, match=words):
        transferred(tmp_path, *extra, **flags)


def test_the_command_is_the_trainer(monkeypatch, capsys):
    called = []
    monkeypatch.setattr("clip_linear_launch.train.main", lambda argv: called.append(argv) or 75)
    assert linearize.main(["--model", "x"]) == 75
    assert called == [["--model", "x", "--attention-transfer", "--force-patch-dropout", "0"]]
    assert linearize.main(["--help"]) == 0 and "convert softmax" in capsys.readouterr().out
