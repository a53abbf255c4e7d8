"""``clip-linear bench train``: our training step beside OpenCLIP's, same model, same synthetic batches, interleaved.

OpenCLIP's side is its own ``train_one_epoch``. Both first take the same steps from the same weights and must show the
same losses; only then is anything timed. The overhead is the median over rounds of the ratio of neighbouring blocks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from clip_linear import provenance
from clip_linear.errors import RunError
from clip_linear.flags import Parser

_GATE_STEPS = 5
_GATE_RTOL = 1e-5


def parser() -> argparse.ArgumentParser:
    """The flags."""
    p = Parser(prog="clip-linear bench train", description=__doc__.split("\n")[0])
    p.add_argument("--model", default="ViT-S-32+mala+mala", help="as in clip-linear train")
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--steps", type=int, default=4, help="steps in a block; blocks of both sides alternate")
    p.add_argument("--rounds", type=int, default=15, help="blocks of each side")
    p.add_argument("--precision", default="fp32")
    p.add_argument("--device", default="cuda", help="falls back to the CPU where there is no GPU")
    p.add_argument("--grad-clip-norm", type=float, default=1.0)
    p.add_argument("--out", help="write the rows to a CSV or JSONL file")
    p.add_argument("--json", action="store_true", help="print the rows as JSON and nothing else")
    return p


def main(argv: list[str]) -> int:
    """Measure and print. Returns 0; raises RunError when the losses differ."""
    args = parser().parse_args(argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.getLogger().setLevel(logging.WARNING)
    rows = measure(args)
    if args.out:
        from clip_linear_eval.results import write_rows

        write_rows(args.out, rows)
    if args.json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return 0
    for row in rows:
        spread = f"(20–80 %: {row['ci_low']:.4g} to {row['ci_high']:.4g})"
        sys.stdout.write(f"{row['metric']:<18} {row['value']:10.4g} {row['unit']:<3} {spread}\n")
    sys.stdout.write(f"{rows[0]['model']}, batch {args.batch_size}, {args.precision}, {rows[0]['device']}\n")
    return 0


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows: seconds a step of both sides, and our overhead. Raises RunError when the correctness gate fails."""
    with tempfile.TemporaryDirectory(prefix="clip-linear-bench-") as folder:
        return _measure(args, folder)


def _measure(args: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    ours, ours_losses, device = _ours(args, folder)
    theirs, theirs_losses, _ = _theirs(args, folder)
    ours(_GATE_STEPS)
    theirs(_GATE_STEPS)
    for step, (a, b) in enumerate(zip(ours_losses, theirs_losses), 1):
        if abs(a - b) > _GATE_RTOL * abs(b):
            raise RunError(f"not timed: at step {step} our loss is {a:.7g}, OpenCLIP's {b:.7g}; they must be equal")
    times: list[tuple[float, float]] = []
    for i in range(args.rounds):
        sides = [ours, theirs] if i % 2 == 0 else [theirs, ours]
        took = {side: _timed(side, args.steps, device) for side in sides}
        times.append((took[ours], took[theirs]))
    return _rows(args, times, device)


def _timed(run: Callable[[int], None], steps: int, device: Any) -> float:
    """Seconds a step of one block."""
    import torch

    start = time.perf_counter()
    run(steps)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / steps


def _rows(args: argparse.Namespace, times: list[tuple[float, float]], device: Any) -> list[dict[str, Any]]:
    from clip_linear.names import model_config
    from clip_linear_eval.results import make_row
    from clip_linear_eval.rows import device_name

    columns = {
        "step_s_ours": [a for a, _ in times],
        "step_s_open_clip": [b for _, b in times],
        "overhead": [100 * (a / b - 1) for a, b in times],
    }
    common = {"model": model_config(args.model)[0], "device": device_name(str(device)), "n": len(times)}
    common |= {"study": "bench train", "provenance": "measured"}
    common |= {"dataset": f"synthetic, batch {args.batch_size}, {args.precision}"}
    common |= {"versions": provenance.versions_text(), "commit": provenance.commit(), "date": provenance.date()}
    rows = []
    for metric, values in columns.items():
        low, *_, high = (
            statistics.quantiles(values, n=5, method="inclusive") if len(values) > 1 else (values[0], values[0])
        )
        unit = "%" if metric == "overhead" else "s"
        rows.append(
            make_row(metric=metric, value=statistics.median(values), unit=unit, ci_low=low, ci_high=high, **common)
        )
    return rows


def _config(args: argparse.Namespace, folder: str) -> Any:
    from clip_linear.train.config import resolve

    flags = f"--train-data none --samples {10**9} --warmup 10 --lr 1e-4 --workers 0 --log-every-n-steps 1000000"
    given = ("model", "batch_size", "precision", "device", "grad_clip_norm")
    chosen = [part for g in given for part in (f"--{g.replace('_', '-')}", str(getattr(args, g)))]
    return resolve([*flags.split(), *chosen, "--run-dir", folder])


def _batches(parts: Any, size: int) -> list[tuple[Any, Any]]:
    """Four random batches; the same for both sides."""
    import torch

    side = parts.model.visual.image_size
    height, width = side if isinstance(side, tuple) else (side, side)
    g = torch.Generator().manual_seed(0)
    out = []
    for _ in range(4):
        words = torch.randint(1, 400, (size, parts.tokenizer.context_length), generator=g)
        words[:, -1] = parts.tokenizer.vocab_size - 1  # the end-of-text token is OpenCLIP's largest id
        out.append((torch.randn(size, 3, height, width, generator=g), words))
    return out


def _ours(args: argparse.Namespace, folder: str) -> tuple[Callable[[int], None], list[float], Any]:
    """(run n steps, losses so far, device): our trainer as it is, fed with ready batches."""
    from clip_linear.train.loop import Trainer
    from clip_linear.train.place import Place
    from clip_linear.train.stop import StopFlag
    from clip_linear.train.world import World, pick_device

    config = _config(args, folder)
    world = World(Place(), pick_device(args.device, Place(), False))

    def loader(_: Any, parts: Any, *__: Any) -> Any:
        for images, texts in itertools.cycle(_batches(parts, args.batch_size)):
            yield SimpleNamespace(images=images, texts=texts, state=None)

    trainer = Trainer(config, world, StopFlag(), None, loader)
    losses: list[float] = []
    look = trainer.guards.look

    def look_and_keep(step: int, loss: float, *rest: Any) -> None:
        losses.append(loss)
        look(step, loss, *rest)

    trainer.guards.look = look_and_keep  # type: ignore[method-assign, assignment]
    trainer.begin()

    def run(steps: int) -> None:
        for _ in range(steps):
            trainer.one_step()
            world.agree([trainer.stop.asked, int(trainer.cadence.minutes_over())])
            trainer.cadence.saves(trainer.step)

    return run, losses, world.device


def _theirs(args: argparse.Namespace, folder: str) -> tuple[Callable[[int], None], list[float], Any]:
    """The same with OpenCLIP's ``train_one_epoch``, one epoch a block."""
    import torch
    from open_clip_train.train import train_one_epoch

    from clip_linear.train import rng
    from clip_linear.train.build import build, make_loss, make_optimizer, make_schedule
    from clip_linear.train.place import Place
    from clip_linear.train.world import pick_device

    config = _config(args, folder)
    device = pick_device(args.device, Place(), False)
    rng.seed_all(config.seed)
    parts = build(config, device)
    rng.seed_all(config.seed)
    batches = _batches(parts, args.batch_size)
    optimizer = make_optimizer(config, parts.model)
    loss, schedule = make_loss(config, 0, 1), make_schedule(config, optimizer)
    losses: list[float] = []
    hook = loss.register_forward_hook(lambda m, i, o: losses.append(o["contrastive_loss"].item()))
    flags = SimpleNamespace(
        **config.openclip | {"device": str(device), "rank": 0, "local_rank": 0, "world_size": 1, "distill": False}
    )
    flags.log_local, flags.wandb, flags.horovod = False, False, False
    scaler = torch.amp.GradScaler(device.type) if config.precision == "amp" else None
    done = 0

    class Blocks(list):  # type: ignore[type-arg]
        @property
        def num_batches(self) -> int:
            return len(self)

        @property
        def num_samples(self) -> int:
            return len(self) * args.batch_size

    def run(steps: int) -> None:
        nonlocal done
        block = Blocks(batches[(done + i) % len(batches)] for i in range(steps))
        data = {"train": SimpleNamespace(dataloader=block, set_epoch=lambda epoch: None)}
        first = done
        train_one_epoch(parts.model, data, loss, 0, optimizer, scaler, lambda step: schedule(first + step), None, flags)
        done += steps
        if done >= _GATE_STEPS:
            hook.remove()  # reading a loss waits for the device, which OpenCLIP's own loop does not do every step

    return run, losses, device
