"""The ranks of an evaluation that was started by torchrun or SLURM; one rank otherwise."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from clip_linear.ending import leave_group


@dataclass(frozen=True)
class World:
    """Rank, number of ranks, and the device of this rank."""

    rank: int
    size: int
    device: str


def pick_device(device: str, local_rank: int = 0) -> str:
    """``auto`` → this rank's GPU where there is one, else cpu. Raises UserError for a device that is not there."""
    import torch

    from clip_linear.errors import UserError

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device)
    except RuntimeError:
        raise UserError(f"--device {device!r} is no device; give cpu, cuda, cuda:1 or auto") from None
    if kind.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {device} asked for, but torch sees no GPU; give cpu")
    if kind.type == "cuda":
        kind = torch.device("cuda", local_rank % torch.cuda.device_count() if kind.index is None else kind.index)
        torch.cuda.set_device(kind)
    return str(kind)


@contextlib.contextmanager
def open_world(device: str) -> Iterator[World]:
    """Join the other ranks that torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_*) names."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World(0, 1, pick_device(device))
        return
    import torch.distributed as dist

    chosen = pick_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if chosen.startswith("cuda") else "gloo")
    try:
        yield World(dist.get_rank(), size, chosen)
    finally:
        leave_group()
