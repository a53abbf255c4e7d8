"""``clip-linear train``: the trainer of ``clip_linear.train`` with evaluation put into it."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

from clip_linear.train.config import TrainConfig, build_parser, resolve
from clip_linear.train.place import place


def main(argv: list[str]) -> int:
    """Train one model. Returns 0 (done), 75 (continue me), 143 (stopped); see ``clip_linear.train.loop.train``."""
    if "-h" in argv or "--help" in argv:
        build_parser().print_help()
        return 0
    config = resolve(argv, world_size=place().world_size)
    if config.dry_run:
        sys.stdout.write(describe(config))
        return 0
    # Spinning threads cost 3 to 14 times on a busy machine. It counts only before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _set_log_levels(config.debug)
    from clip_linear.train.loop import train

    return train(config)


def describe(config: TrainConfig) -> str:
    """What --dry-run prints."""
    from clip_linear.profile import profile
    from clip_linear.train.effective import effective_config

    model = profile(effective_config(config))
    facts: dict[str, Any] = {
        "run_id": config.run_id,
        "folder": str(config.run_dir),
        "model": config.model,
        "parameters": f"{model.n_params_total:,} (vision {model.n_params_vision:,}, text {model.n_params_text:,})",
        "gmacs": f"{model.gmacs:.4g} a sample forward, {model.gmacs * config.steps * config.global_batch:.4g} in all",
        "samples": f"{config.steps * config.global_batch:,} in {config.steps:,} steps of {config.global_batch:,}",
        "ranks": config.world_size,
        "data": config.train_data,
        "flags": json.dumps(config.to_argv(), ensure_ascii=False),
    }
    return "".join(f"{name:<11} {value}\n" for name, value in facts.items())


def _set_log_levels(debug: bool) -> None:
    """OpenCLIP reports every detail on the root logger; ours and its warnings are what a run's log is for."""
    logging.getLogger().setLevel(logging.DEBUG if debug else logging.WARNING)
    for package in ("clip_linear", "clip_linear_eval", "clip_linear_launch"):
        logging.getLogger(package).setLevel(logging.DEBUG if debug else logging.INFO)
