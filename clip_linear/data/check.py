"""Scan shards without training: good samples, faults by reason, histograms, duplicates. Parallel; can go on later."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clip_linear.data.decode import BadImageError, decode_image
from clip_linear.data.faults import SHARD_REASONS, Fault, costs_a_sample
from clip_linear.data.fetch import Store
from clip_linear.data.filters import parse_filters
from clip_linear.data.reader import open_shard
from clip_linear.data.remote import scheme
from clip_linear.errors import RunError, UserError
from clip_linear.files import append_jsonl, read_jsonl


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What decides the result for a shard."""

    caption_key: str | None
    filters: tuple[str, ...]
    max_image_pixels: int
    keep_captions: bool


@dataclass(kw_only=True)
class ShardReport:
    """What one shard holds."""

    url: str
    samples: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    captions: list[str] = field(default_factory=list)  # only when asked for
    caption_lengths: dict[str, int] = field(default_factory=dict)  # first number of the bin -> samples
    image_sides: dict[str, int] = field(default_factory=dict)
    image_hashes: list[str] = field(default_factory=list)  # of the encoded bytes, 64 bit
    examples: dict[str, dict[str, Any]] = field(default_factory=dict)  # reason -> first fault


def check_shard(url: str, options: CheckOptions) -> ShardReport:
    """Read and decode everything in one shard."""
    report = ShardReport(url=url)
    faults: Counter[str] = Counter()
    lengths: Counter[str] = Counter()
    sides: Counter[str] = Counter()
    filters = parse_filters(options.filters)

    def lose(found: Sequence[Fault]) -> None:
        for fault in found:
            faults[fault.reason] += 1
            report.examples.setdefault(fault.reason, fault.row(0))

    shard = open_shard(url, Store())
    lose(shard.faults)
    for ordinal in range(len(shard.groups)):
        pair, found = shard.read(ordinal, options.caption_key, filters)
        lose(found)
        if pair is None:
            continue
        try:
            image = decode_image(pair.image, max_pixels=options.max_image_pixels)
        except BadImageError as error:
            lose([Fault(error.reason, url, pair.key, pair.offset, error.detail)])
            continue
        caption = pair.caption(f"{url}/{pair.key}")
        report.samples += 1
        lengths[_bin(len(caption))] += 1
        sides[_bin(min(image.size))] += 1
        report.image_hashes.append(hashlib.blake2b(pair.image, digest_size=8).hexdigest())
        if options.keep_captions:
            report.captions.append(caption)
    shard.close()
    report.faults, report.caption_lengths, report.image_sides = dict(faults), dict(lengths), dict(sides)
    return report


def _bin(value: int) -> str:
    """Bins grow by powers of two: 0, 1, 2, 4, 8, …"""
    return str(1 << (value.bit_length() - 1)) if value else "0"


def check_shards(
    urls: Sequence[str], options: CheckOptions, workers: int, resume: Path | None, tell: Callable[[int, int], None]
) -> list[ShardReport]:
    """Reports of all shards in their order. ``resume`` keeps finished ones, and gives them back if they still hold.

    ``tell(done, all)`` is called after each. Raises RunError when a worker process dies.
    """
    done = _finished(resume, options)
    tags = {url: _tag(url, options) for url in urls}
    reports = {url: done[tag] for url, tag in tags.items() if tag in done}
    left = [url for url in dict.fromkeys(urls) if url not in reports]
    for report in _scan(left, options, workers):
        reports[report.url] = report
        if resume is not None:
            append_jsonl(resume, {"tag": tags[report.url], **asdict(report)})
        tell(len(reports), len(tags))
    return [reports[url] for url in dict.fromkeys(urls)]


def _scan(urls: Sequence[str], options: CheckOptions, workers: int) -> Iterator[ShardReport]:
    if workers <= 1 or len(urls) <= 1:
        for url in urls:
            yield check_shard(url, options)
        return
    with ProcessPoolExecutor(min(workers, len(urls))) as pool:
        futures = [pool.submit(check_shard, url, options) for url in urls]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            raise RunError(
                "a scanning process was killed (out of memory?); use fewer --workers, and --resume to go on"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _tag(url: str, options: CheckOptions) -> str:
    """Names a shard as it is now, read with these options."""
    state = ""
    if scheme(url) in ("", "file"):
        path = Path(url.removeprefix("file://"))
        if path.is_file():
            state = f"{path.stat().st_size}/{path.stat().st_mtime_ns}"
    return hashlib.sha256(json.dumps([url, state, asdict(options)]).encode()).hexdigest()[:24]


def _finished(resume: Path | None, options: CheckOptions) -> dict[str, ShardReport]:
    if resume is None:
        return {}
    done = {}
    try:
        if resume.exists() and resume.read_text(encoding="utf-8")[:1] not in ("", "{"):
            raise KeyError("tag")  # somebody else's file: nothing may be appended to it
        for row in read_jsonl(resume):
            tag = row.pop("tag")
            done[tag] = ShardReport(**row)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, IsADirectoryError):
        raise UserError(f"--resume {str(resume)!r} is no file of this command; name a new file") from None
    return done


def summarize(reports: Sequence[ShardReport], with_captions: bool) -> dict[str, Any]:
    """The one object that ``data check --json`` prints."""
    hashes = Counter(h for r in reports for h in r.image_hashes)
    per_shard: dict[str, dict[str, Any]] = {}
    for report in reports:
        per_shard[report.url] = {"samples": report.samples, "faults": report.faults}
        if with_captions:
            per_shard[report.url]["captions"] = report.captions
    return {
        "shards": len(reports),
        "samples": sum(r.samples for r in reports),
        "faults": _sum(r.faults for r in reports),
        "duplicate_images": sum(n - 1 for n in hashes.values()),
        "caption_characters": _sum(r.caption_lengths for r in reports),
        "image_shorter_side": _sum(r.image_sides for r in reports),
        "per_shard": per_shard,
    }


def _sum(counts: Iterator[dict[str, int]] | Any) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    numeric = all(name.isdigit() for name in total)
    return dict(sorted(total.items(), key=lambda c: (int(c[0]) if numeric else 0, c[0])))


def over_limit(reports: Sequence[ShardReport], max_rate: float) -> str | None:
    """Why the shards are worse than the limit allows (samples and shards counted apart); None when they are not."""
    good = sum(r.samples for r in reports)
    bad = sum(n for r in reports for reason, n in r.faults.items() if costs_a_sample(reason))
    broken = sum(any(f in SHARD_REASONS and f != "data_after_end" for f in r.faults) for r in reports)
    if not good:
        return "no usable sample"
    if bad > max_rate * (good + bad):
        return f"{bad} of {good + bad} samples are bad, more than --max-fault-rate {max_rate:g} allows"
    if broken > max_rate * len(reports):
        return f"{broken} of {len(reports)} shards are damaged, more than --max-fault-rate {max_rate:g} allows"
    return None
