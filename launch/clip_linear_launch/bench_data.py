"""``clip-linear bench data``: our reader beside OpenCLIP's ``get_wds_dataset`` on the same shards, in turns."""

from __future__ import annotations

import argparse
import io
import json
import logging
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clip_linear.errors import RunError, UserError
from clip_linear.flags import Parser


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``clip-linear bench data``."""
    parser = Parser(
        prog="clip-linear bench data",
        description="Samples a second of our reader and of OpenCLIP's, in turns, with the same transform and "
        "tokenizer. First both must give the same pixels and tokens for every sample.",
    )
    parser.add_argument("--train-data", help="clean shards (default: synthetic ones, written for this)")
    parser.add_argument("--side", type=int, default=256, help="of the synthetic images, pixels (%(default)s)")
    parser.add_argument("--count", type=int, default=1500, help="of the synthetic images (%(default)s)")
    parser.add_argument("--image-size", type=int, default=224, help="of the model, pixels (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="(%(default)s)")
    parser.add_argument("--batches", type=int, default=12, help="timed in a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of each reader (%(default)s)")
    parser.add_argument("--out", type=Path, help="also write rows: .csv or .jsonl")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str]) -> int:
    """Measure and print; returns the exit code."""
    args = build_parser().parse_args(argv)
    for name in ("side", "count", "image_size", "batch_size", "batches", "rounds"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}; give at least 1")
    logging.getLogger("clip_linear").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="clip-linear-bench-") as folder:
        data = args.train_data or write_synthetic(Path(folder), args.side, args.count, max(8, *args.workers))
        results = [measure(args, data, workers) for workers in args.workers]
    what = args.train_data or f"{args.count} synthetic JPEGs of {args.side} px"
    if args.json:
        sys.stdout.write(json.dumps({"data": what, "results": results}) + "\n")
    else:
        sys.stdout.write(_table(what, args, results))
    if args.out is not None:
        _write_rows(args.out, what, args, results)
    return 0


def write_synthetic(folder: Path, side: int, count: int, shards: int) -> str:
    """Shards of smooth random pictures with noise: JPEGs about as large as photographs of that size."""
    import numpy as np
    from PIL import Image

    from clip_linear.data.write import Pair, ShardWriter

    rng = np.random.default_rng(0)
    with ShardWriter(folder / "shards", max(1, -(-count // shards))) as writer:
        for i in range(count):
            coarse = Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).resize((side, side))
            pixels = np.asarray(coarse).astype(np.int16) + rng.integers(-6, 7, (side, side, 3), dtype=np.int16)
            buffer = io.BytesIO()
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
            writer.add(Pair(buffer.getvalue(), "jpg", f"a synthetic picture with the number {i}"))
    return str(folder / "shards")


def measure(args: argparse.Namespace, data: str, workers: int) -> dict[str, Any]:
    """Check that both readers give the same, then time them in turns."""
    import open_clip

    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    transform = open_clip.transform.image_transform(args.image_size, is_train=True)
    same = open_clip.transform.image_transform(args.image_size, is_train=False)
    checked = check_equal(data, same, tokenizer)
    readers: dict[str, Callable[[], Iterator[int]]] = {
        "clip_linear": lambda: read_ours(data, transform, tokenizer, workers, args),
        "open_clip": lambda: read_theirs(data, transform, tokenizer, workers, args),
    }
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(args.rounds):
        for name, read in readers.items():
            rates[name].append(time_round(read(), args.batches, warm_up=2 + 3 * workers))
    ratios = [a / b for a, b in zip(rates["clip_linear"], rates["open_clip"])]
    return {
        "workers": workers,
        "samples_checked": checked,
        "samples_per_s": {name: spread(values) for name, values in rates.items()},
        "ratio": spread(ratios),
    }


def time_round(batches: Iterator[int], n: int, warm_up: int) -> float:
    """Samples a second over ``n`` batches, after some that start the workers and fill the buffers."""
    for _ in range(warm_up):
        next(batches)
    start = time.perf_counter()
    samples = sum(next(batches) for _ in range(n))
    seconds = time.perf_counter() - start
    batches.close()  # type: ignore[attr-defined]
    return samples / seconds


def spread(values: list[float]) -> dict[str, float]:
    """Median with the 20th and 80th percentile."""
    if len(values) == 1:
        return {"median": values[0], "p20": values[0], "p80": values[0]}
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return {"median": statistics.median(values), "p20": fifths[0], "p80": fifths[3]}


def read_ours(data: str, transform: Any, tokenizer: Any, workers: int, args: argparse.Namespace) -> Iterator[int]:
    """Batch sizes from our reader, for ever (as far as a round goes)."""
    from clip_linear.data import DataConfig, train_loader

    config = DataConfig(
        train_data=data, batch_size=args.batch_size, num_samples=args.batch_size * 10_000, workers=workers
    )
    loader = train_loader(config, transform, tokenizer)
    for batch in loader:
        yield batch.samples
    loader.close()


def read_theirs(data: str, transform: Any, tokenizer: Any, workers: int, args: argparse.Namespace) -> Iterator[int]:
    """Batch sizes from OpenCLIP's training pipeline."""
    from clip_linear.data import expand

    settings = types.SimpleNamespace(
        train_data="::".join(expand(data)),
        dataset_resampled=False,
        train_num_samples=args.batch_size * 10_000,
        train_data_upsampling_factors=None,
        seed=0,
        workers=workers,
        world_size=1,
        batch_size=args.batch_size,
    )
    info = get_wds_dataset(settings, transform, True, tokenizer)
    for images, _ in info.dataloader:
        yield len(images)


def get_wds_dataset(settings: Any, transform: Any, is_train: bool, tokenizer: Any) -> Any:
    """OpenCLIP's pipeline, mended for newer webdataset as our second door does it."""
    from open_clip_train import data

    from clip_linear.compat import no_end_of_shard_marker

    no_end_of_shard_marker()
    return data.get_wds_dataset(settings, transform, is_train, tokenizer=tokenizer)


def check_equal(data: str, transform: Any, tokenizer: Any) -> int:
    """The correctness gate: one pass of both, every sample equal in pixels and tokens. Returns how many."""
    import torch

    from clip_linear.data import DataConfig, expand, train_loader

    settings = types.SimpleNamespace(
        val_data="::".join(expand(data)), val_num_samples=None, workers=0, batch_size=32, seed=0, world_size=1
    )
    batches = list(get_wds_dataset(settings, transform, False, tokenizer).dataloader)
    theirs: dict[bytes, list[Any]] = {}
    for images, texts in batches:
        for image, text in zip(images, texts):
            theirs.setdefault(text.numpy().tobytes(), []).append(image)
    n = sum(map(len, theirs.values()))
    if not n:
        raise RunError("OpenCLIP's reader gives no sample for these shards; give clean ones")
    config = DataConfig(train_data=data, batch_size=1, num_samples=n, draft=False, max_fault_rate=1.0)
    for batch in train_loader(config, transform, tokenizer):
        images = theirs.get(batch.texts[0].numpy().tobytes(), [])
        match = next((i for i, image in enumerate(images) if torch.equal(image, batch.images[0])), None)
        if match is None:
            raise RunError("the two readers differ on these shards (are they clean?); nothing was timed")
        del images[match]
    return n


def _table(what: str, args: argparse.Namespace, results: list[dict[str, Any]]) -> str:
    lines = [f"{what}, {args.image_size} px, batch {args.batch_size}, median (p20–p80) of {args.rounds} rounds"]
    lines.append(f"{results[0]['samples_checked']} samples equal in pixels and tokens")
    lines.append(f"{'workers':>7}  {'clip_linear, samples/s':>26}  {'open_clip, samples/s':>26}  {'ratio':>20}")
    for result in results:
        cells = [*result["samples_per_s"].values()]
        texts = [f"{c['median']:.0f} ({c['p20']:.0f}–{c['p80']:.0f})" for c in cells]
        ratio = result["ratio"]
        texts.append(f"{ratio['median']:.2f} ({ratio['p20']:.2f}–{ratio['p80']:.2f})")
        lines.append(f"{result['workers']:>7}  {texts[0]:>26}  {texts[1]:>26}  {texts[2]:>20}")
    return "\n".join(lines) + "\n"


def _write_rows(out: Path, what: str, args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    from clip_linear import provenance
    from clip_linear_eval.results import make_row, write_rows

    rows = []
    for result in results:
        for reader, value in result["samples_per_s"].items():
            rows.append(
                make_row(
                    study="bench data",
                    dataset=what,
                    metric=f"samples_per_s/{reader}/workers={result['workers']}/px={args.image_size}",
                    value=value["median"],
                    ci_low=value["p20"],
                    ci_high=value["p80"],
                    unit="1/s",
                    n=args.rounds,
                    provenance="measured",
                    device="cpu",
                    versions=provenance.versions_text(),
                    commit=provenance.commit(),
                    date=provenance.date(),
                )
            )
    write_rows(out, rows)
