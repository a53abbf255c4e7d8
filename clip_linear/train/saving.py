"""What a checkpoint holds, gathered from all ranks; and a trainer put back to where a checkpoint stands."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from clip_linear import provenance
from clip_linear.train import checkpoint, rng
from clip_linear.train.build import build
from clip_linear.train.wrap import full_optimizer, full_weights, load_full

if TYPE_CHECKING:
    from clip_linear.train.loop import Trainer

log = logging.getLogger(__name__)


def collect(trainer: Trainer) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
    """The checkpoint and the weights to publish, in host memory, on rank 0; None on the others. A collective."""
    config, world = trainer.config, trainer.world
    ranks = world.gather({"rng": rng.get(world.device), "data": trainer.feed.state})
    weights = full_weights(trainer.inner, world.is_first)
    optimizer = full_optimizer(trainer.inner, trainer.optimizer, world.is_first)
    average = None if trainer.ema is None else trainer.ema.full()
    if not world.is_first:
        return None
    saved: dict[str, Any] = {
        "epoch": trainer.step // config.steps_per_epoch,
        "name": config.name or config.run_id,
        "state_dict": weights,
        "optimizer": optimizer,
        "step": trainer.step,
        "samples_seen": trainer.step * config.global_batch,
        "seconds": trainer.seconds_so_far(),
        "loss": trainer.loss,
        "data_state": [r["data"] for r in ranks],
        "rng": [r["rng"] for r in ranks],
        "guards": trainer.guards.state(),
        "spec": {
            "format": checkpoint.FORMAT,
            "run_id": config.run_id,
            "world_size": world.world_size,
            "workers": config.workers,
            "versions": dict(provenance.versions()),
        },
    }
    if trainer.stepper.scaler is not None:
        saved["scaler"] = trainer.stepper.scaler.state_dict()
    if average is not None:
        saved["ema"] = average
    saved = checkpoint.to_host(saved)
    return saved, saved["state_dict"] | saved.get("ema", {})


def to_evaluate(trainer: Trainer) -> torch.nn.Module:
    """The model that evaluation gets: the bare one; under FSDP a whole copy, as evaluation looks into its towers."""
    if not trainer.config.fsdp:
        return trainer.inner
    plain = dataclasses.replace(trainer.config, ours=trainer.config.ours | {"fsdp": False})
    copy = build(plain, trainer.world.device).model
    copy.load_state_dict(full_weights(trainer.inner))
    return copy


def restore(trainer: Trainer) -> list[Any] | None:
    """Put a new trainer to where the newest valid checkpoint stands (rank 0 decides which).

    Returns the data states of all ranks; None when there is none. Raises UserError for a --resume that cannot be read.
    """
    config, world = trainer.config, trainer.world
    found = checkpoint.newest(trainer.run_dir) if world.is_first else None
    path = world.broadcast(None if found is None else str(found))
    if path is None and config.resume not in (None, "latest"):
        path = config.resume
    if path is None:
        return None
    saved, name = checkpoint.load(Path(path)), Path(path).name
    load_full(trainer.inner, trainer.optimizer, saved)
    if trainer.stepper.scaler is not None and "scaler" in saved:
        trainer.stepper.scaler.load_state_dict(saved["scaler"])
    if "step" not in saved:
        trainer.step = int(saved["epoch"]) * config.steps_per_epoch
        log.info("continuing OpenCLIP's checkpoint %s from epoch %d (step %d)", path, saved["epoch"], trainer.step)
        return None
    trainer.step, trainer.seconds, trainer.loss = saved["step"], saved["seconds"], saved["loss"]
    trainer.guards.restore(saved["guards"])
    if trainer.ema is not None and "ema" in saved:
        trainer.ema.load_state_dict(saved["ema"])
    spec = saved["spec"]
    if spec["run_id"] != config.run_id:
        log.warning("%s belongs to another run, %s; its step and data position are taken over", path, spec["run_id"])
    before, now = (spec["world_size"], spec["workers"]), (world.world_size, config.workers)
    if before != now:
        log.warning(
            "%s was written by %d ranks with %d workers each; now there are %d with %d, so the order of the samples "
            "changes from here on",
            *(name, *before, *now),
        )
    if spec["world_size"] == world.world_size:
        rng.put(saved["rng"][world.rank], world.device)
    else:
        rng.seed_all(config.seed + world.rank + trainer.step)
    log.info("resuming %s: step %d of %d", name, trainer.step, config.steps)
    return saved["data_state"]
