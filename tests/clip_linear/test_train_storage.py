"""A disk that is full, a folder that may not be written: a clear message, and the earlier checkpoints stay."""

import errno
import json
import os
import subprocess
import sys
import time

import pytest

from clip_linear.errors import RunError
from clip_linear.train import checkpoint, report
from clip_linear.train.loop import train
from tests.clip_linear.train_helpers import FakeLoader, argv, config, rows, same_bits, weights


def _limited(args, limit_bytes):
    """Train in another process in which no file may grow beyond a limit; returns its code and last line."""
    code = (
        "import resource, sys; sys.path.insert(0, '.'); "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_bytes}, {limit_bytes})); "
        "from tests.clip_linear.train_helpers import FakeLoader; from clip_linear.train.config import resolve; "
        "from clip_linear.train.loop import train; from clip_linear.errors import RunError\n"
        "try: train(resolve(sys.argv[1:]), make_loader=FakeLoader)\n"
        "except RunError as error: print(error); sys.exit(1)"
    )
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=200)


def test_a_file_that_cannot_be_written_whole(tmp_path):
    args = argv(tmp_path, save_every_steps=3)
    done = _limited(args, 2_000_000)  # a checkpoint of this model has 9.7 MB
    assert done.returncode == 1 and "cannot write a checkpoint" in done.stdout, done.stdout + done.stderr
    assert checkpoint.steps_on_disk(tmp_path / "run") == []
    assert not list(checkpoint.folder(tmp_path / "run").glob(".*")), "nothing half-written stays"
    assert "cannot write" in json.loads((tmp_path / "run" / "failed.json").read_text())["reason"]
    assert train(config(tmp_path, save_every_steps=3), make_loader=FakeLoader) == 0
    assert not (tmp_path / "run" / "failed.json").exists()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 24 MiB (as root only)."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root; run as root to test a full disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_keeps_the_earlier_checkpoint(tmp_path, small_disk):
    """Room for the first checkpoint (9.7 MB) and its weights (3.2 MB); the third fits no more until space is made."""
    cfg = config(tmp_path, run_dir=small_disk / "run", save_every_steps=4, keep_last=9)
    whole = config(tmp_path, run_dir=tmp_path / "whole", save_every_steps=4)
    assert train(whole, make_loader=FakeLoader) == 0
    with pytest.raises(RunError, match=r"cannot write .*the earlier (ones|checkpoints) are untouched"):
        train(cfg, make_loader=FakeLoader)
    kept = checkpoint.steps_on_disk(cfg.run_dir)
    assert kept and all(not checkpoint.damage(checkpoint.path_of(cfg.run_dir, step)) for step in kept)
    assert not list(checkpoint.folder(cfg.run_dir).glob(".*"))
    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    assert train(cfg, make_loader=FakeLoader) == 0
    assert rows(cfg.run_dir) == rows(whole.run_dir)
    assert same_bits(weights(cfg.run_dir, 12), weights(whole.run_dir, 12))


def test_a_disk_that_is_full_for_the_metrics_loses_no_checkpoint(tmp_path, monkeypatch):
    """While a checkpoint is being written, its own temporary file may be what fills the disk."""
    cfg = config(tmp_path, save_every_steps=4)
    write, real = checkpoint.Writer._write, report.append_jsonl

    def full(path, *lines):
        if lines[0].get("step") == 5:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, *lines)

    monkeypatch.setattr(checkpoint.Writer, "_write", lambda *args: (time.sleep(0.5), write(*args)))
    monkeypatch.setattr(report, "append_jsonl", full)
    with pytest.raises(RunError, match=r"cannot write .*metrics.jsonl .*checkpoints are untouched"):
        train(cfg, make_loader=FakeLoader)
    assert checkpoint.steps_on_disk(cfg.run_dir) == [4]
    monkeypatch.undo()
    assert train(cfg, make_loader=FakeLoader) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root; run as root to test a read-only folder")
def test_a_read_only_checkpoint_folder(tmp_path):
    cfg = config(tmp_path, save_every_steps=4)
    folder = checkpoint.folder(cfg.run_dir)
    folder.mkdir(parents=True)
    (cfg.run_dir / "config.toml").write_text(cfg.to_toml())
    for options in (["--bind", str(folder)], ["-o", "remount,ro,bind"]):
        if subprocess.run(["mount", *options, str(folder)], capture_output=True).returncode:
            pytest.skip("bind mounts are not allowed here")
    try:
        with pytest.raises((RunError, OSError), match=r"Read-only|cannot write a checkpoint"):
            train(cfg, make_loader=FakeLoader)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
    assert train(cfg, make_loader=FakeLoader) == 0
