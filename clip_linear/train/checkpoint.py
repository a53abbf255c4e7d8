"""Checkpoints: written in the background without ever leaving a torn file under a final name; found and read again.

A file is an OpenCLIP checkpoint (``state_dict, epoch, name, optimizer, scaler``) plus ``step, samples_seen, data_state,
rng, guards, ema, spec``; tensors and builtins only, so ``torch.load(weights_only=True)`` reads it.
"""

from __future__ import annotations

import logging
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from clip_linear.errors import RunError, UserError
from clip_linear.files import replacing

log = logging.getLogger(__name__)
WEIGHTS, OPENCLIP_CONFIG = "open_clip_model.safetensors", "open_clip_config.json"
FORMAT = 1


def folder(run_dir: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_dir / "checkpoints"


def path_of(run_dir: Path, step: int) -> Path:
    """The checkpoint of a step."""
    return folder(run_dir) / f"step_{step:09d}.pt"


def steps_on_disk(run_dir: Path) -> list[int]:
    """Steps that have a checkpoint under a final name, oldest first. Nothing else in the folder counts."""
    names = [p.stem.removeprefix("step_") for p in folder(run_dir).glob("step_*.pt")]
    return sorted(int(n) for n in names if n.isdigit())


def to_host(value: Any) -> Any:
    """A deep copy with every tensor cloned to host memory: what a background writer may keep."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: to_host(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_host(v) for v in value)
    return value


class Writer:
    """Writes checkpoints in a thread, at most one in flight; keeps the last ``keep_last`` and all milestones."""

    def __init__(self, run_dir: Path, keep_last: int, is_milestone: Callable[[int], bool], latest_link: bool) -> None:
        self.run_dir, self.keep_last, self.is_milestone, self.latest_link = (
            run_dir,
            keep_last,
            is_milestone,
            latest_link,
        )
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        folder(run_dir).mkdir(parents=True, exist_ok=True)
        for torn in folder(run_dir).glob(".*.tmp"):
            log.info("removing %s, left by a killed save", torn.name)
            torn.unlink(missing_ok=True)

    def save(self, checkpoint: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        """Start writing (both in host memory already); waits for the one before. Raises RunError if that failed."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(checkpoint, weights), name="checkpoint-writer")
        self._thread.start()

    def check(self) -> None:
        """Raise RunError when a write has failed."""
        if self._error is not None:
            error, self._error = self._error, None
            raise RunError(
                f"cannot write a checkpoint under {folder(self.run_dir)} ({error}); the earlier ones are untouched: "
                "make room or fix the permissions, then start the same command again"
            ) from error

    def wait(self) -> None:
        """Wait until what was started is on disk. Raises RunError when it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _write(self, checkpoint: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        try:
            target = path_of(self.run_dir, checkpoint["step"])
            with replacing(target) as tmp:
                torch.save(checkpoint, tmp)
            if self.latest_link:
                latest = target.with_name("epoch_latest.pt")
                linked = target.with_name(".epoch_latest.pt.tmp")
                linked.unlink(missing_ok=True)
                linked.hardlink_to(target)
                linked.replace(latest)
            write_weights(self.run_dir / WEIGHTS, weights)
            self._prune()
        except Exception as error:  # noqa: BLE001 - of whatever library (a full disk has three types): check() raises it
            self._error = error

    def _prune(self) -> None:
        steps = steps_on_disk(self.run_dir)
        for step in steps[: max(0, len(steps) - max(1, self.keep_last))]:
            if not self.is_milestone(step):
                path_of(self.run_dir, step).unlink(missing_ok=True)


def write_weights(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write the weights atomically as safetensors, which OpenCLIP's ``local-dir:`` reads."""
    from safetensors.torch import save_file

    with replacing(path) as tmp:
        save_file({k: v.contiguous() for k, v in weights.items()}, tmp, metadata={"format": "pt"})


def damage(path: Path) -> str:
    """What is wrong with a checkpoint file; empty when nothing is.

    ``torch.load`` does not verify checksums (a flipped byte in a weight loads without a word), so every member of the
    zip archive is read against its CRC here.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
        return f"checksum of {bad} is wrong" if bad else ""
    except (OSError, zipfile.BadZipFile) as error:
        return str(error) or type(error).__name__


def newest(run_dir: Path) -> Path | None:
    """The newest valid checkpoint of the run, or None. Damaged ones are skipped with a line each."""
    for step in reversed(steps_on_disk(run_dir)):
        path = path_of(run_dir, step)
        wrong = damage(path)
        if not wrong:
            return path
        log.warning("skipping damaged checkpoint %s: %s", path.name, wrong)
    return None


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint, ours or OpenCLIP's, into host memory; ``module.`` prefixes are taken off.

    Raises UserError when the file is missing, damaged, or no training checkpoint.
    """
    if not path.is_file():
        raise UserError(f"checkpoint {str(path)!r} does not exist; give a .pt file, or leave --resume out")
    wrong = damage(path) if zipfile.is_zipfile(path) else "no zip archive"
    if wrong:
        raise UserError(f"checkpoint {str(path)!r} is damaged ({wrong}); give another one")
    found = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(found, dict) or "state_dict" not in found:
        raise UserError(f"{str(path)!r} holds weights only, no training state; start from it with --pretrained")
    for key in ("state_dict", "ema"):
        if key in found:
            found[key] = {k.removeprefix("module."): v for k, v in found[key].items()}
    return found
