"""A run that was stopped and continued equals one that was not, bit for bit; what stands in its way is said clearly."""

import json
import os
import signal

import pytest
import torch

from clip_linear.errors import RunError, UserError
from clip_linear.train import checkpoint
from clip_linear.train.loop import train
from tests.clip_linear.train_helpers import FakeLoader, argv, config, rows, same_bits, weights


class Interrupting(FakeLoader):
    """Sends this process a signal as it hands out a batch."""

    at, signal = 5, signal.SIGUSR2

    def __iter__(self):
        for batch in super().__iter__():
            if batch.state["n"] == self.at:
                os.kill(os.getpid(), self.signal)
            yield batch


def interrupting(at, number=signal.SIGUSR2):
    return type("At", (Interrupting,), {"at": at, "signal": number})


EXTRAS = {
    "plain": [],
    "patch dropout": ["--force-patch-dropout", "0.5"],
    "accumulation": ["--accum-freq", "2"],
    "average": ["--ema-decay", "0.9"],
    "siglip, clipped": ["--siglip", "--grad-clip-norm", "0.1"],
    "bf16": ["--precision", "amp_bf16"],
    "fp16 with a scaler": ["--precision", "amp"],
    "timm optimizer": ["--opt", "timm/lion"],
}


QUICK = ("plain", "patch dropout", "accumulation", "fp16 with a scaler")  # the others are marked slow


@pytest.mark.parametrize(
    "extra", [pytest.param(e, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name, e in EXTRAS.items()]
)
def test_stopped_and_continued_is_the_same_run(tmp_path, extra):
    whole, parts = config(tmp_path, *extra, run_dir=tmp_path / "whole"), config(tmp_path, *extra)
    assert train(whole, make_loader=FakeLoader) == 0
    assert train(parts, make_loader=interrupting(3)) == 75
    assert train(parts, make_loader=interrupting(5, signal.SIGTERM)) == 143
    assert not (parts.run_dir / "done.json").exists()
    assert train(parts, make_loader=FakeLoader) == 0
    assert rows(parts.run_dir) == rows(whole.run_dir)
    assert [r["step"] for r in rows(whole.run_dir)] == list(range(1, whole.steps + 1))
    assert same_bits(weights(parts.run_dir, whole.steps), weights(whole.run_dir, whole.steps))
    done = [json.loads((c.run_dir / "done.json").read_text()) for c in (whole, parts)]
    assert {k: v for k, v in done[0].items() if k not in ("seconds", "date")} == {
        k: v for k, v in done[1].items() if k not in ("seconds", "date")
    }


def test_rows_after_the_checkpoint_are_written_again(tmp_path):
    cfg = config(tmp_path, save_every_steps=3)
    assert train(cfg, make_loader=interrupting(5)) == 75
    whole = rows(cfg.run_dir)
    (cfg.run_dir / "checkpoints" / "step_000000005.pt").unlink()  # as if it had been killed before it could save
    with open(cfg.run_dir / "metrics.jsonl", "a") as f:
        f.write('{"step": 6, "lo')
    assert train(cfg, make_loader=FakeLoader) == 0
    assert rows(cfg.run_dir)[:5] == whole and [r["step"] for r in rows(cfg.run_dir)] == list(range(1, 13))


def test_a_finished_run_is_left_alone(tmp_path):
    cfg = config(tmp_path)
    assert train(cfg, make_loader=FakeLoader) == 0
    before = {p: p.stat().st_mtime_ns for p in cfg.run_dir.rglob("*")}
    assert train(cfg, make_loader=FakeLoader) == 0
    assert {p: p.stat().st_mtime_ns for p in cfg.run_dir.rglob("*")} == before


def test_damaged_and_foreign_files_are_skipped(tmp_path, caplog):
    cfg = config(tmp_path, save_every_steps=2, keep_last=9)
    assert train(cfg, make_loader=interrupting(6)) == 75
    folder = checkpoint.folder(cfg.run_dir)
    whole = (folder / "step_000000006.pt").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1  # torch.load would read this one without a word
    (folder / "step_000000006.pt").write_bytes(flipped)
    (folder / "step_000000004.pt").write_bytes(whole[: len(whole) // 2])
    (folder / ".step_000000008.pt.abc.tmp").write_bytes(b"torn")
    (folder / "tmp.pt").write_bytes(b"torn")
    (cfg.run_dir / "checkpoints_old").mkdir()
    (cfg.run_dir / "checkpoints_old" / "step_000000099.pt").write_bytes(whole)
    assert checkpoint.newest(cfg.run_dir).name == "step_000000002.pt"
    assert "step_000000006.pt" in caplog.text and "step_000000004.pt" in caplog.text
    assert train(cfg, make_loader=FakeLoader) == 0
    assert not list(folder.glob(".*.tmp"))


def test_another_run_is_refused(tmp_path):
    assert train(config(tmp_path), make_loader=interrupting(2)) == 75
    with pytest.raises(UserError, match=r"--lr: 0.01 there, 0.02 here"):
        train(config(tmp_path, lr=0.02), make_loader=FakeLoader)
    with pytest.raises(UserError, match="another model"):
        train(config(tmp_path, model_suffix="+mala"), make_loader=FakeLoader)
    with pytest.raises(UserError, match="batch: 8 there, 16 here"):
        train(config(tmp_path, world_size=2), make_loader=FakeLoader)
    assert train(config(tmp_path), make_loader=FakeLoader) == 0


def test_checkpoint_is_openclips_and_more(tmp_path):
    import open_clip

    import clip_linear

    cfg = config(tmp_path)
    train(cfg, make_loader=FakeLoader)
    path = cfg.run_dir / "checkpoints" / "step_000000012.pt"
    saved = torch.load(path, weights_only=True)
    assert {"state_dict", "epoch", "name", "optimizer", "step", "samples_seen", "data_state", "rng", "spec"} <= set(
        saved
    )
    clip_linear.register()
    one = open_clip.create_model(f"local-dir:{cfg.run_dir}")
    two = clip_linear.create_model(argv(tmp_path)[1], pretrained=str(path))
    assert same_bits(one.state_dict(), saved["state_dict"]) and same_bits(two.state_dict(), saved["state_dict"])


def test_retention_and_links(tmp_path):
    cfg = config(tmp_path, "--save-most-recent", save_every_steps=1, keep_last=2, keep_every_samples=40)
    train(cfg, make_loader=FakeLoader)
    assert checkpoint.steps_on_disk(cfg.run_dir) == [5, 10, 11, 12]
    folder = checkpoint.folder(cfg.run_dir)
    assert (folder / "epoch_latest.pt").read_bytes() == (folder / "step_000000012.pt").read_bytes()


def test_epochs_as_in_openclip(tmp_path):
    base = argv(tmp_path, "--train-num-samples", "32", "--epochs", "3")
    from clip_linear.train.config import resolve

    del base[base.index("--samples") : base.index("--samples") + 2]
    cfg = resolve([*base, "--save-frequency", "2"])
    assert cfg.steps == 12
    train(cfg, make_loader=FakeLoader)
    assert checkpoint.steps_on_disk(cfg.run_dir) == [8, 12]


class Poisoned(FakeLoader):
    """Some batches hold a NaN."""

    bad = frozenset({4, 5})

    def __iter__(self):
        for batch in super().__iter__():
            if batch.state["n"] in self.bad:
                batch.images = batch.images * float("nan")
            yield batch


def test_bad_steps_are_skipped_up_to_a_limit(tmp_path):
    cfg = config(tmp_path, max_bad_steps=2)
    assert train(cfg, make_loader=Poisoned) == 0
    assert json.loads((cfg.run_dir / "done.json").read_text())["bad_steps"] == 2
    assert all(torch.isfinite(v).all() for v in weights(cfg.run_dir, 12).values())
    assert [r["loss"] is None for r in rows(cfg.run_dir)] == [n in Poisoned.bad for n in range(1, 13)]


def test_divergence_ends_with_the_step_and_a_good_checkpoint(tmp_path):
    cfg = config(tmp_path, max_bad_steps=1, save_every_steps=1)
    with pytest.raises(RunError, match="diverged: loss nan at step 5"):
        train(cfg, make_loader=Poisoned)
    failed = json.loads((cfg.run_dir / "failed.json").read_text())
    assert "step 5" in failed["reason"] and "traceback" in failed
    newest = checkpoint.load(checkpoint.newest(cfg.run_dir))
    assert all(torch.isfinite(v).all() for v in newest["state_dict"].values())


def test_openclip_checkpoint_is_continued(tmp_path):
    cfg = config(tmp_path)
    train(cfg, make_loader=FakeLoader)
    saved = torch.load(cfg.run_dir / "checkpoints" / "step_000000012.pt", weights_only=True)
    theirs = {k: saved[k] for k in ("state_dict", "optimizer", "name")} | {"epoch": 1}
    theirs["state_dict"] = {f"module.{k}": v for k, v in theirs["state_dict"].items()}  # as DDP saves it
    torch.save(theirs, tmp_path / "epoch_1.pt")
    more = config(
        tmp_path, "--train-num-samples", "48", "--resume", str(tmp_path / "epoch_1.pt"), run_dir=tmp_path / "b"
    )
    assert train(more, make_loader=FakeLoader) == 0
    assert [r["step"] for r in rows(more.run_dir)] == list(range(7, 13))


@pytest.mark.parametrize("text, words", [(b"torn", "damaged"), (None, "does not exist")])
def test_resume_path_mistakes(tmp_path, text, words):
    path = tmp_path / "x.pt"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(UserError, match=words):
        train(config(tmp_path, "--resume", str(path)), make_loader=FakeLoader)


def test_a_gpu_skips_bad_steps_the_same_way(tmp_path, monkeypatch):
    """On CUDA the fused optimizer skips by itself; its CPU form follows the same protocol."""
    from clip_linear.train.step import Stepper

    assert train(config(tmp_path, max_bad_steps=2), make_loader=Poisoned) == 0
    original = Stepper.__init__

    def on_device(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.skips_on_device = True

    monkeypatch.setattr(Stepper, "__init__", on_device)
    device = config(tmp_path, max_bad_steps=2, run_dir=tmp_path / "device")
    assert train(device, make_loader=Poisoned) == 0
    assert rows(device.run_dir) == rows(tmp_path / "run")
    assert same_bits(weights(device.run_dir, 12), weights(tmp_path / "run", 12))
