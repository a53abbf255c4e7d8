"""The loader of a run: batches for one rank, exact to the budget, with the state that continues after each."""

from __future__ import annotations

import faulthandler
import functools
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from clip_linear.data.config import DataConfig
from clip_linear.data.faultlog import FaultLog, RateLimit
from clip_linear.data.fetch import Store
from clip_linear.data.filters import parse_filters
from clip_linear.data.shards import shard_list
from clip_linear.data.state import adopt, fingerprint, fresh_stream
from clip_linear.data.stream import NoSamplesError, Stream, StreamPlan
from clip_linear.data.transform import Prepare, own_randomness
from clip_linear.errors import RunError, UserError

log = logging.getLogger(__name__)


@dataclass
class Batch:
    """``images`` [B, 3, H, W] float32, ``texts`` [B, L] int64, and the state (builtins) that continues after it."""

    images: Tensor
    texts: Tensor
    samples: int
    state: dict[str, Any]


def train_loader(
    config: DataConfig,
    preprocess: Any,
    tokenizer: Any,
    *,
    rank: int = 0,
    world_size: int = 1,
    state: Mapping[str, Any] | None = None,
    step: int = 0,
    faults_path: Path | None = None,
) -> TrainLoader:
    """The loader of one rank. ``preprocess`` and ``tokenizer`` are OpenCLIP's: they run where samples are decoded.

    To continue, pass ``state`` (a ``Batch.state``; with several ranks ``merge_states`` of all of them) and ``step``,
    the number of batches that each rank has had. Raises UserError for data or settings that cannot be.
    """
    return TrainLoader(config, preprocess, tokenizer, rank, world_size, state, step, faults_path)


class TrainLoader:
    """Iterable of Batch; ``len`` is the number of batches of the whole budget. Iterate it once.

    ``faults`` counts what was lost by reason, cumulative over the run (also over restarts), for this rank.
    """

    def __init__(
        self,
        config: DataConfig,
        preprocess: Any,
        tokenizer: Any,
        rank: int,
        world_size: int,
        state: Mapping[str, Any] | None,
        step: int,
        faults_path: Path | None,
    ) -> None:
        shards = check_config(config)
        self.config, self.rank, self.step = config, rank, step
        self.per_rank = max(1, config.workers)
        streams = self.per_rank * world_size
        name = fingerprint(shards.urls)
        self.state = adopt(
            state,
            shards=name,
            n_shards=len(shards.urls),
            seed=config.seed,
            streams=streams,
            resampled=config.dataset_resampled,
        )
        self.total = -(-config.num_samples // (config.batch_size * world_size))
        plan = StreamPlan(
            shards=shards,
            seed=config.seed,
            era=self.state["era"],
            streams=streams,
            resampled=config.dataset_resampled,
            batch_size=config.batch_size,
            buffer_bytes=int(config.shuffle_buffer_mib * 2**20),
            caption_key=config.caption_key,
            filters=parse_filters(config.filters),
        )
        mine = range(rank * self.per_rank, (rank + 1) * self.per_rank)
        self.mine = [str(s) for s in mine]
        self.dataset = StreamDataset(
            plan,
            Prepare(preprocess, tokenizer, config),
            [(s, self.state["streams"].get(str(s)) or fresh_stream()) for s in mine],
            step,
            max(0, self.total - step),
        )
        self.log = FaultLog(faults_path, rank, world_size, self.state["rows"] if state is not None else None)
        self.limit = RateLimit(config.max_fault_rate)
        self.rss_bytes: dict[int, int] = {}

    def __len__(self) -> int:
        return self.total

    @property
    def faults(self) -> dict[str, int]:
        """Faults of this rank by reason, up to the last batch."""
        total: dict[str, int] = {}
        for stream in self.mine:
            for reason, n in self.state["streams"].get(stream, {}).get("faults", {}).items():
                total[reason] = total.get(reason, 0) + n
        return dict(sorted(total.items()))

    def __iter__(self) -> Iterator[Batch]:
        items = self._here() if self.config.workers == 0 else self._from_workers()
        for item in items:
            if isinstance(item, str):
                self.log.close(self.faults)
                raise RunError(item)
            yield self._receive(item)
        self.log.close(self.faults)

    def _receive(self, item: dict[str, Any]) -> Batch:
        stream = str(item["stream"])
        self.rss_bytes[item["pid"]] = item["rss_bytes"]
        streams = {**self.state["streams"], stream: item["state"]}
        rows = {**self.state["rows"], str(self.rank): self.log.write(item["faults"])}
        self.state = {**self.state, "streams": streams, "rows": rows}
        self.limit.check(item["stream"], item["state"], self.faults)
        own = {s: streams[s] for s in self.mine if s in streams}
        return Batch(item["images"], item["texts"], len(item["texts"]), {**self.state, "streams": own})

    def _here(self) -> Iterator[Any]:
        items = iter(self.dataset)
        while True:
            with own_randomness():
                item = next(items, None)
            if item is None:
                return
            yield item

    def _from_workers(self) -> Iterator[Any]:
        loader = DataLoader(
            self.dataset,
            batch_size=None,
            num_workers=self.config.workers,
            collate_fn=_same,
            worker_init_fn=_start_worker,
            prefetch_factor=2,
            timeout=self.config.timeout_s,
            pin_memory=torch.cuda.is_available(),
            multiprocessing_context=self.config.start_method,
        )
        items = iter(loader)
        while True:
            try:
                yield next(items)
            except StopIteration:
                return


def check_config(config: DataConfig) -> Any:
    """The shards of a config whose settings can be. Raises UserError."""
    for name, least in (("batch_size", 1), ("num_samples", 1), ("workers", 0)):
        if getattr(config, name) < least:
            raise UserError(f"{name} is {getattr(config, name)}; give at least {least}")
    if config.upsampling_factors is not None and not config.dataset_resampled:
        raise UserError("--train-data-upsampling-factors weighs draws with replacement; add --dataset-resampled")
    return shard_list(config.train_data, config.upsampling_factors)


class StreamDataset(IterableDataset):  # type: ignore[type-arg]
    """The streams of one rank; in a worker process, that worker's one."""

    def __init__(
        self, plan: StreamPlan, prepare: Prepare, streams: list[tuple[int, dict[str, Any]]], step: int, left: int
    ) -> None:
        self.plan, self.prepare, self.streams, self.step, self.left = plan, prepare, streams, step, left

    def __iter__(self) -> Iterator[dict[str, Any] | str]:
        info = get_worker_info()
        turn = info.id if info is not None else 0
        # The DataLoader asks worker 0 first, also after a restart in the middle of a round: turn the streams instead.
        number, state = self.streams[(turn + self.step) % len(self.streams)]
        batches = len(range(turn, self.left, len(self.streams)))
        try:
            stream = Stream(self.plan, number, state, self.prepare, Store())
            for _ in range(batches):
                pairs, after, faults = stream.next_batch()
                images, texts = self.prepare.batch(pairs)
                yield {
                    "images": images,
                    "texts": texts,
                    "stream": number,
                    "state": after,
                    "faults": faults,
                    "pid": os.getpid(),
                    "rss_bytes": _rss_bytes(),
                }
        except NoSamplesError as error:  # as a value: an exception would reach the main process inside a traceback
            yield str(error)


def _same(item: Any) -> Any:
    return item


def _start_worker(_: int) -> None:
    # Signals to the job are the main process's to answer; Ctrl-C and a cluster's notice reach all processes.
    for name in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    faulthandler.enable(sys.__stderr__ or 2)


def _rss_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as f:
            return int(f.read().split()[1]) * _page_bytes()
    except OSError:
        return 0


@functools.cache
def _page_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE")
