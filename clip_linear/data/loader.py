"""The loader of a run: batches for one rank, exact to the budget, with the state that continues after each."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from clip_linear.data.cache import ShardCache
from clip_linear.data.config import DataConfig
from clip_linear.data.faultlog import FaultLog, RateLimit
from clip_linear.data.faults import Fault
from clip_linear.data.fetch import Store
from clip_linear.data.filters import parse_filters
from clip_linear.data.shards import ShardList, shard_list
from clip_linear.data.state import add_up, adopt, fingerprint, fresh_stream
from clip_linear.data.stream import NoSamplesError, Stream, StreamPlan
from clip_linear.data.transform import Prepare, own_randomness
from clip_linear.data.watch import Watchdog, describe_dead, dump_workers, too_slow
from clip_linear.errors import RunError, UserError

log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1
_POLL_S = 2.0  # how often a wait for a worker looks whether it lives


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

    ``faults`` counts what was lost by reason over the whole run (restarts included), for this rank.
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
        self.total = -(-config.num_samples // (config.batch_size * world_size))
        per_rank = max(1, config.workers)
        self.state = adopt(
            state,
            shards=fingerprint(shards.urls),
            n_shards=len(shards.urls),
            seed=config.seed,
            streams=per_rank * world_size,
            resampled=config.dataset_resampled,
        )
        mine = list(range(rank * per_rank, (rank + 1) * per_rank))
        self.mine = [str(s) for s in mine]
        if any(name not in self.state["streams"] for name in self.mine[: step if state is not None else 0]):
            log.warning("the checkpoint holds no data state of rank %d: its data begin anew", rank)
        self.log = FaultLog(faults_path, rank, world_size, self.state["faults"])
        self.limit = RateLimit(config.max_fault_rate, {s: self.state["streams"].get(s) for s in self.mine})
        self.rss_bytes: dict[int, int] = {}
        self.has_warned = False
        self.dataset = StreamDataset(
            StreamPlan(
                shards=shards,
                seed=config.seed,
                era=self.state["era"],
                streams=per_rank * world_size,
                resampled=config.dataset_resampled,
                batch_size=config.batch_size,
                buffer_bytes=int(config.shuffle_buffer_mib * 2**20),
                caption_key=config.caption_key,
                filters=parse_filters(config.filters),
            ),
            Prepare(preprocess, tokenizer, config),
            [(s, self.state["streams"].get(str(s)) or fresh_stream()) for s in mine],
            step,
            max(0, self.total - step),
            (config.shard_cache, int(config.shard_cache_gib * 2**30)),
        )

    def __len__(self) -> int:
        return self.total

    @property
    def faults(self) -> dict[str, int]:
        """What this rank has met by reason, up to the last batch: each fault once, however many passes meet it."""
        return dict(self.log.counts)

    @property
    def delivered(self) -> dict[str, int]:
        """Samples delivered to this rank by source (``"0"``, ``"1"``, … of ``--train-data``), up to the last batch."""
        streams = self.state["streams"]
        return dict(sorted(add_up(streams[s]["delivered"] for s in self.mine if s in streams).items()))

    def __iter__(self) -> Iterator[Batch]:
        items = self._here() if self.config.workers == 0 else self._from_workers()
        with contextlib.closing(items):
            for item in items:
                if isinstance(item, Failure):
                    raise UserError(item.text) if item.is_users else RunError(item.text)
                yield self._receive(item)

    def close(self) -> None:
        """Tell the counts. (The worker processes end with the iterator.)"""
        self.log.close(self.delivered)

    def _receive(self, item: Item) -> Batch:
        stream = str(item.stream)
        self.rss_bytes[item.pid] = item.rss_bytes
        if item.has_repeated and not self.has_warned:
            self.has_warned = True
            log.warning(
                "a batch of %d holds a sample more than once: the shards give a stream fewer samples than that",
                self.config.batch_size,
            )
        self.log.take(item.faults)
        self.state = {**self.state, "streams": {**self.state["streams"], stream: item.state}}
        self.limit.check(stream, item.state, self.faults)
        own = {s: self.state["streams"][s] for s in self.mine if s in self.state["streams"]}
        return Batch(
            item.images, item.texts, len(item.texts), {**self.state, "streams": own, "faults": self.log.saved()}
        )

    def _here(self) -> Generator[Item | Failure, None, None]:
        items = iter(self.dataset)
        watchdog = Watchdog(self.config.timeout_s)
        try:
            while True:
                with watchdog.watching(), own_randomness():
                    item = next(items, None)
                if item is None:
                    return
                yield item
        finally:
            watchdog.close()

    def _from_workers(self) -> Generator[Item | Failure, None, None]:
        items = self._start_workers()
        workers: list[BaseProcess] = getattr(items, "_workers", [])
        deadline = time.monotonic() + self.config.timeout_s
        try:
            while True:
                try:
                    item = next(items)
                except StopIteration:
                    return
                # Besides torch's own RuntimeError: a worker's batch may have been on its way when it died.
                except (RuntimeError, EOFError, OSError) as error:
                    is_late = "timed out" in str(error)
                    dead = describe_dead(workers, self.rss_bytes, 0.0 if is_late else 0.5)
                    if dead is not None:
                        raise RunError(dead) from None
                    if not is_late:
                        raise
                    if time.monotonic() < deadline:
                        continue
                    dump_workers(workers)
                    raise RunError(too_slow(self.config.timeout_s)) from None
                yield item
                deadline = time.monotonic() + self.config.timeout_s
        finally:
            del items  # torch asks its workers to end; one that is stuck would keep this process from ending
            for worker in workers:
                worker.kill()

    def _start_workers(self) -> Iterator[Item | Failure]:
        loader = DataLoader(
            self.dataset,
            batch_size=None,
            num_workers=self.config.workers,
            collate_fn=_same,
            worker_init_fn=_start_worker,
            prefetch_factor=2,
            timeout=min(_POLL_S, self.config.timeout_s),
            pin_memory=torch.cuda.is_available(),
            multiprocessing_context=self.config.start_method,
            generator=torch.Generator(),  # its base seed is drawn from here, not from the process's generator
        )
        before = signal.getsignal(signal.SIGCHLD)
        if getattr(before, "__module__", "") == "torch.utils.data._utils.signal_handling":  # of another DataLoader
            before = signal.SIG_DFL
        items = iter(loader)
        if threading.current_thread() is threading.main_thread():
            # torch's handler raises wherever the main thread happens to be; we look after the workers where we wait.
            signal.signal(signal.SIGCHLD, before)
        return items


def check_config(config: DataConfig) -> ShardList:
    """The shards of a config whose settings can be. Raises UserError."""
    for name, least in (("batch_size", 1), ("num_samples", 1), ("workers", 0)):
        if getattr(config, name) < least:
            raise UserError(f"{name} is {getattr(config, name)}; give at least {least}")
    if config.upsampling_factors is not None and not config.dataset_resampled:
        raise UserError("--train-data-upsampling-factors weighs draws with replacement; add --dataset-resampled")
    return shard_list(config.train_data, config.upsampling_factors)


@dataclass
class Item:
    """One batch on its way out of a worker."""

    images: Tensor
    texts: Tensor
    stream: int
    state: dict[str, Any]
    faults: list[Fault]
    pid: int
    rss_bytes: int
    has_repeated: bool

    def pin_memory(self) -> Item:
        """Asked for by the DataLoader when there is a GPU; the state, which may be long, is not walked through."""
        return dataclasses.replace(self, images=self.images.pin_memory(), texts=self.texts.pin_memory())


@dataclass(frozen=True)
class Failure:
    """An error on its way out of a worker, as a value: an exception would arrive inside a traceback."""

    text: str
    is_users: bool = False


class StreamDataset(IterableDataset):  # type: ignore[type-arg]
    """The streams of one rank; in a worker process, that worker's one."""

    def __init__(
        self,
        plan: StreamPlan,
        prepare: Prepare,
        streams: list[tuple[int, dict[str, Any]]],
        step: int,
        left: int,
        cache: tuple[str | None, int],
    ) -> None:
        self.plan, self.prepare, self.streams, self.step, self.left = plan, prepare, streams, step, left
        self.cache = cache

    def __iter__(self) -> Iterator[Item | Failure]:
        info = get_worker_info()
        turn = info.id if info is not None else 0
        # The DataLoader asks worker 0 first, also after a restart in the middle of a round: turn the streams instead.
        number, state = self.streams[(turn + self.step) % len(self.streams)]
        batches = len(range(turn, self.left, len(self.streams)))
        try:
            yield from self._batches(number, state, batches)
        except UserError as error:
            yield Failure(str(error), is_users=True)
        except NoSamplesError as error:
            yield Failure(str(error))
        except OSError as error:
            yield Failure(f"reading the shards failed: {error}")

    def _batches(self, number: int, state: dict[str, Any], batches: int) -> Iterator[Item]:
        folder, limit = self.cache
        store = Store(cache=None if folder is None else ShardCache(Path(folder), limit))
        stream = Stream(self.plan, number, state, self.prepare, store)
        for batch in range(batches):
            pairs, after, faults = stream.next_batch(is_last=batch == batches - 1)
            images, texts = self.prepare.batch(pairs)
            yield Item(images, texts, number, after, faults, os.getpid(), _rss_bytes(), stream.has_repeated)


def _same(item: Any) -> Any:
    return item


def _start_worker(_: int) -> None:
    # Signals to the job are the main process's to answer; Ctrl-C and a cluster's notice reach all processes.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    # A worker that outlived a killed main process would hold its memory and the run's lock.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # Linux only; elsewhere torch looks every 5 s
    faulthandler.enable(2)


def _rss_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
