"""What is worth saying before a run starts on this machine; nothing is changed silently."""

from __future__ import annotations

import os
from typing import Any

_PREFETCH = 2  # batches that PyTorch's loader keeps ready for each data worker
_BYTES = 4  # float32 pixels


def shared_memory(run: dict[str, Any], ranks: int, folder: str = "/dev/shm") -> str | None:
    """A warning when the data workers' batches do not fit into shared memory (they would die of it), else None.

    Bytes = ranks × workers × batches kept ready × batch size × 3 × image_size² × 4.
    """
    argv = run.get("argv", [])

    def flag(name: str, default: int) -> int:
        return int(argv[argv.index(f"--{name}") + 1]) if f"--{name}" in argv[:-1] else default

    try:
        room = os.statvfs(folder)
    except OSError:
        return None
    size, workers, batch = run.get("image_size"), flag("workers", 4), flag("batch-size", 64)
    if not isinstance(size, int) or not workers:
        return None
    need = ranks * workers * _PREFETCH * batch * 3 * size**2 * _BYTES
    free = room.f_bavail * room.f_frsize
    if need <= free:
        return None
    return (
        f"{folder} has {free / 2**20:.0f} MiB free, the batches of {ranks} × {workers} data workers need about "
        f"{need / 2**20:.0f} MiB: they may die with 'unable to allocate shared memory'; "
        "use --workers 0, a smaller --batch-size, or a larger /dev/shm"
    )
