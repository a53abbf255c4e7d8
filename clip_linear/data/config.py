"""What decides the data of a run. Free of torch, so that commands can build it before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass

from clip_linear.data.decode import MAX_ASPECT, MAX_IMAGE_PIXELS


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data and how they are read; ``batch_size`` and ``workers`` are per rank, as in OpenCLIP."""

    train_data: str  # brace pattern, glob, folder, list file, URL or ``pipe:`` command; several joined with ``::``
    upsampling_factors: str | None = None  # one number a source, joined with ``::``; only with dataset_resampled
    dataset_resampled: bool = False  # shards with replacement
    batch_size: int
    num_samples: int  # the whole budget of samples seen over all ranks; rounded up to whole global batches
    seed: int = 0
    workers: int = 0
    caption_key: str | None = None  # json fields instead of .txt, in order of preference, e.g. "long,caption,txt"
    filters: tuple[str, ...] = ()  # what to keep, e.g. "punsafe<0.5"
    max_image_pixels: int = MAX_IMAGE_PIXELS
    max_aspect: float = MAX_ASPECT  # longer images are cut to their centre; 0 leaves them
    shuffle_buffer_mib: float = 64.0  # of encoded samples, for each worker
    max_fault_rate: float = 0.05  # bad samples in the window that end the run; 1 never ends it
    timeout_s: float = 300.0  # a batch that takes longer ends the run
    shard_cache: str | None = None  # folder that keeps fetched shards, shared by all processes
    shard_cache_gib: float = 50.0  # its limit
    draft: bool = True  # large JPEGs may be decoded at 1/2, 1/4, 1/8, never below twice the size the transform makes
    start_method: str | None = None  # of the worker processes; None: Python's default
