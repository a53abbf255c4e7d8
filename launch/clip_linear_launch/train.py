"""``clip-linear train``: the trainer of ``clip_linear.train`` with evaluation put into it."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from clip_linear.train.config import TrainConfig, build_parser, resolve
from clip_linear.train.place import place

_REMEMBERED_TEXTS = 200_000  # prompts whose tokens are kept from one evaluation to the next, for each set


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

    return train(config, evaluation(config))


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


def evaluation(config: TrainConfig) -> Callable[..., list[dict[str, Any]]] | None:
    """What evaluates the run's model on --eval-data; None without it. Raises UserError for sets that cannot be scored,
    now and not when the run has trained."""
    if not config.eval_data:
        return None
    from clip_linear_eval.datasets import open_source, resolve
    from clip_linear_eval.zeroshot import evaluate

    for dataset in config.eval_data:
        source = open_source(dataset)
        if source.captions is None or source.targets is not None:
            resolve(source, None, None, False, None)
    info = columns(config)
    remembered: dict[tuple[str, ...], Any] = {}

    def run(
        model: Any, tokenizer: Any, preprocess_val: Any, *, device: Any, precision: str, rank: int, world_size: int
    ) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for dataset in config.eval_data:
            rows += evaluate(
                model,
                preprocess_val,
                Remembering(tokenizer, remembered),
                dataset,
                precision=precision,
                device=str(device),
                rank=rank,
                world_size=world_size,
                info=info,
            )
        return rows

    return run


def columns(config: TrainConfig) -> dict[str, Any]:
    """The columns of a row that a run's config decides."""
    from dataclasses import asdict

    from clip_linear.names import variant_label
    from clip_linear.profile import profile
    from clip_linear.train.effective import effective_config

    cfg = effective_config(config)
    counted = asdict(profile(cfg))
    return {
        "run_id": config.run_id,
        "model": config.model,
        "image_variant": variant_label(cfg, "image"),
        "text_variant": variant_label(cfg, "text"),
        "seed": config.seed,
        "gmacs": counted["gmacs"],
    } | {k: v for k, v in counted.items() if k.startswith("n_params_")}


class Remembering:
    """A tokenizer that tokenises the prompts of an evaluation set once a run."""

    def __init__(self, tokenizer: Any, known: dict[tuple[str, ...], Any]) -> None:
        self.tokenizer, self.known = tokenizer, known

    def __call__(self, texts: Any, *args: Any, **kwargs: Any) -> Any:
        """The tokenizer's tokens."""
        if args or kwargs or isinstance(texts, str) or len(texts) > _REMEMBERED_TEXTS:
            return self.tokenizer(texts, *args, **kwargs)
        key = tuple(texts)
        if key not in self.known:
            self.known[key] = self.tokenizer(texts)
        return self.known[key]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def _set_log_levels(debug: bool) -> None:
    """OpenCLIP reports every detail on the root logger; ours and its warnings are what a run's log is for."""
    logging.getLogger().setLevel(logging.DEBUG if debug else logging.WARNING)
    for package in ("clip_linear", "clip_linear_eval", "clip_linear_launch"):
        logging.getLogger(package).setLevel(logging.DEBUG if debug else logging.INFO)
