"""Batches for the loop: the reader of ``clip_linear.data`` set up from flags, and its state after each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from clip_linear.errors import RunError
from clip_linear.train.build import Parts
from clip_linear.train.config import TrainConfig
from clip_linear.train.folder import FAULTS
from clip_linear.train.step import Pair
from clip_linear.train.world import World


class Batch(Protocol):
    """What a loader yields."""

    images: Any  # [B, 3, H, W]
    texts: Any  # [B, L]
    state: Any  # builtins: where this rank's reader stands after this batch


# (config, parts, world, states of all ranks or None, batches each rank has had, path for faults) -> batches
MakeLoader = Callable[[TrainConfig, Parts, World, list[Any] | None, int, Path], Iterable[Batch]]


def read_shards(
    config: TrainConfig, parts: Parts, world: World, states: list[Any] | None, batches: int, faults_path: Path
) -> Iterable[Batch]:
    """The reader of ``clip_linear.data`` for the run's flags."""
    from clip_linear.data import DataConfig, merge_states, train_loader

    flags, ours = config.openclip, config.ours
    asked = {
        "caption_key": ours["caption_key"],
        "filters": tuple(ours["filter"]) or None,
        "max_image_pixels": ours["max_image_pixels"],
        "max_aspect": ours["max_aspect"],
        "shuffle_buffer_mib": ours["shuffle_buffer_mib"],
        "max_fault_rate": ours["max_fault_rate"],
        "timeout_s": ours["data_timeout_s"],
        "shard_cache": ours["shard_cache"],
        "upsampling_factors": flags["train_data_upsampling_factors"],
    }
    data = DataConfig(
        train_data=flags["train_data"],
        dataset_resampled=flags["dataset_resampled"],
        batch_size=flags["batch_size"],
        num_samples=config.steps * config.global_batch,
        seed=flags["seed"],
        workers=flags["workers"],
        **{k: v for k, v in asked.items() if v is not None},
    )
    return train_loader(
        data,
        parts.preprocess_train,
        parts.tokenizer,
        rank=world.rank,
        world_size=world.world_size,
        state=None if states is None else merge_states(states),
        step=batches,
        faults_path=faults_path,
    )


def shard_names(config: TrainConfig) -> str:
    """A fingerprint of the list of shards, which must be the same on all ranks. Raises UserError for an empty one."""
    from clip_linear.data import expand
    from clip_linear.data.state import fingerprint

    return fingerprint(expand(config.train_data))


class Feed:
    """Gives the loop ``accum_freq`` batches a step."""

    def __init__(
        self,
        config: TrainConfig,
        parts: Parts,
        world: World,
        states: list[Any] | None,
        step: int,
        make_loader: MakeLoader | None = None,
    ) -> None:
        self.config = config
        if states is not None and None in states:  # saved before the first batch
            states = None
        self.state = states[world.rank] if states is not None and world.rank < len(states) else None
        done = step * config.accum_freq
        self._loader = (make_loader or read_shards)(config, parts, world, states, done, config.run_dir / FAULTS)
        self._batches: Iterator[Batch] | None = None

    @property
    def faults(self) -> dict[str, int]:
        """Bad samples and shards so far, by reason."""
        return dict(getattr(self._loader, "faults", {}))

    def next_pairs(self) -> list[Pair]:
        """The next step's (images, texts). Raises RunError when the reader ends early."""
        if self._batches is None:
            self._batches = iter(self._loader)
        pairs = []
        for _ in range(self.config.accum_freq):
            batch = next(self._batches, None)
            if batch is None:
                raise RunError("the reader ended before the run's samples were reached; check the shards")
            pairs.append((batch.images, batch.texts))
            self.state = batch.state
        return pairs

    def close(self) -> None:
        """Let the workers go."""
        self._batches = None
        close = getattr(self._loader, "close", None)
        if close is not None:
            close()
