"""``clip-linear data check|write``: scan shards; make shards from folders or tables."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_linear.data.decode import MAX_IMAGE_PIXELS
from clip_linear.errors import UserError
from clip_linear.flags import Parser, integer, number

if TYPE_CHECKING:
    from clip_linear.data.check import ShardReport


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``clip-linear data``."""
    parser = Parser(prog="clip-linear data", description="Scan image–text shards, or write them.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="check|write")
    check = commands.add_parser(
        "check", help="scan shards: good samples, faults by reason, histograms, duplicates",
        description="Scan shards as training would read them. Exit code 1 when the faults exceed --max-fault-rate.",
    )  # fmt: skip
    check.add_argument("shards", nargs="+", help="shards in the syntax of --train-data: brace, glob, folder, list, URL")
    check.add_argument("--json", action="store_true", help="print one JSON object")
    check.add_argument("--captions", action="store_true", help="with --json: the captions of each shard")
    check.add_argument("--caption-key", help="json fields with captions, in order of preference: long,caption,txt")
    check.add_argument("--filter", action="append", default=[], metavar="EXPR", help="keep only, e.g. 'punsafe<0.5'")
    check.add_argument("--max-image-pixels", type=integer(1), default=MAX_IMAGE_PIXELS, help="larger images are bad")
    check.add_argument("--max-fault-rate", type=number(0, 1), default=0.05, help="allowed bad part (%(default)s)")
    check.add_argument("--workers", type=integer(1), default=os.cpu_count() or 1, help="processes (%(default)s)")
    check.add_argument("--resume", type=Path, metavar="FILE", help="keep finished shards' results here; go on from it")
    write = commands.add_parser(
        "write", help="make shards from folders or tables",
        description="Write image–caption pairs as shards in img2dataset's layout.",
    )  # fmt: skip
    write.add_argument(
        "sources", nargs="+", help="folders (images with .txt or .json beside them), .csv, .tsv, .parquet"
    )
    write.add_argument("--out", type=Path, required=True, help="new or empty folder")
    write.add_argument("--samples-per-shard", type=integer(1), default=10_000, help="(%(default)s)")
    write.add_argument("--csv-img-key", default="filepath", help="column of the image: path or bytes (%(default)s)")
    write.add_argument("--csv-caption-key", default="title", help="column of the caption (%(default)s)")
    write.add_argument("--csv-separator", help="of a text table; by default , for .csv and tab for .tsv")
    write.add_argument("--shuffle", type=int, metavar="SEED", help="shuffle the pairs")
    write.add_argument("--max-image-pixels", type=integer(1), default=MAX_IMAGE_PIXELS, help="leave out larger ones")
    write.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    args = build_parser().parse_args(argv)
    return run_check(args) if args.command == "check" else run_write(args)


def run_check(args: argparse.Namespace) -> int:
    """Scan; 1 when the faults exceed the limit."""
    from clip_linear.data.check import CheckOptions, check_shards, over_limit, summarize
    from clip_linear.data.filters import parse_filters
    from clip_linear.data.shards import expand

    parse_filters(args.filter)
    if args.captions and not args.json:
        raise UserError("--captions is only printed with --json; add --json")
    options = CheckOptions(
        caption_key=args.caption_key,
        filters=tuple(args.filter),
        max_image_pixels=args.max_image_pixels,
        keep_captions=args.captions,
    )
    reports = check_shards(expand(args.shards), options, args.workers, args.resume, _progress())
    reason = over_limit(reports, args.max_fault_rate)
    summary = summarize(reports, args.captions)
    print(json.dumps(summary) if args.json else _table(summary, reports))
    if reason is not None:
        sys.stderr.write(f"clip-linear data check: {reason}\n")
    return 0 if reason is None else 1


def _progress() -> Any:
    def tell(done: int, total: int) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{done}/{total} shards" + ("\n" if done == total else ""))

    return tell


def _table(summary: dict[str, Any], reports: list[ShardReport]) -> str:
    lines = [f"{summary['shards']} shards, {summary['samples']} good samples"]
    if summary["duplicate_images"]:
        lines.append(f"{summary['duplicate_images']} samples repeat the image of another")
    for reason, n in sorted(summary["faults"].items(), key=lambda c: -c[1]):
        first = next(r.examples[reason] for r in reports if reason in r.examples)
        where = first["shard"] + (f" key {first['key']}" if first["key"] else "")
        lines.append(f"  {reason:<22}{n:>8}   first: {where} ({first['detail']})")
    lines += _histogram("caption characters", summary["caption_characters"])
    lines += _histogram("image, shorter side", summary["image_shorter_side"])
    return "\n".join(lines)


def _histogram(title: str, counts: dict[str, int]) -> list[str]:
    if not counts:
        return []
    most = max(counts.values())
    bars = [f"  from {first:>7}{n:>9}  {'#' * max(1, round(40 * n / most))}" for first, n in counts.items()]
    return [title, *bars]


def run_write(args: argparse.Namespace) -> int:
    """Write shards; 1 when no pair could be written."""
    from clip_linear.data.decode import BadImageError
    from clip_linear.data.samples import CaptionError
    from clip_linear.data.sources import find_entries, shuffled
    from clip_linear.data.write import ShardWriter, encode_pair

    if args.csv_separator is not None and len(args.csv_separator) != 1:
        raise UserError(f"--csv-separator {args.csv_separator!r} must be one character (a tab in a shell: $'\\t')")
    for source in args.sources:
        if Path(source).resolve() == args.out.resolve():
            raise UserError(f"--out {str(args.out)!r} is also a source; give a new or an empty folder")
    found = find_entries(args.sources, args.csv_img_key, args.csv_caption_key, args.csv_separator)
    faults: Counter[str] = Counter()
    with ShardWriter(args.out, args.samples_per_shard) as writer:
        for entry in shuffled(found, args.shuffle):
            try:
                image, caption = entry.load()
                writer.add(encode_pair(image, caption, args.max_image_pixels))
            except (CaptionError, BadImageError) as error:
                _lose(faults, error.reason, entry.name, error.detail)
            except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
                _lose(faults, "missing_image", entry.name, str(error))
    samples = sum(writer.sizes.values())
    result = {"shards": len(writer.sizes), "samples": samples, "faults": dict(faults), "out": str(args.out)}
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{result['shards']} shards with {samples} samples in {args.out}")
        for reason, n in faults.most_common():
            print(f"  left out: {reason} ×{n}")
    if not samples:
        sys.stderr.write("clip-linear data write: nothing written: no source has an image with a caption\n")
    return 0 if samples else 1


def _lose(faults: Counter[str], reason: str, name: str, detail: str) -> None:
    faults[reason] += 1
    if faults[reason] == 1:
        sys.stderr.write(f"left out: {reason}, first {name} ({detail})\n")
