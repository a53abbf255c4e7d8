"""The ranks of a run: who we are, the process group, and the few collectives that the loop needs.

A single process uses no torch.distributed at all. With several, control messages travel over a gloo group of their
own, so that agreeing on a stop or waiting for a save never touches (or waits for) the accelerator's stream.
"""

from __future__ import annotations

import datetime
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from clip_linear.ending import leave_group
from clip_linear.errors import RunError, UserError
from clip_linear.provenance import available_cores
from clip_linear.train.folder import attempts_so_far
from clip_linear.train.place import Place, place

log = logging.getLogger(__name__)
PREFLIGHT_S = 60.0
RENDEZVOUS_S = 300.0


class World:
    """The ranks of this run. Make with ``World.join``; call ``leave`` at the end."""

    def __init__(self, where: Place, device: torch.device, backend: str = "") -> None:
        self.rank, self.world_size = where.rank, where.world_size
        self.local_rank, self.local_size = where.local_rank, where.local_size
        self.device, self.backend = device, backend
        self.control: Any = None  # the gloo group for messages between the CPUs
        self.rendezvous: Path | None = None  # the file by which the ranks met

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the run's folder."""
        return self.rank == 0

    @classmethod
    def join(cls, flags: dict[str, Any], run_dir: Path, timeout_s: float) -> World:
        """Choose the device, start the process group if there are several ranks. Raises UserError or RunError."""
        where = place()
        if where.rank > 0:  # what all ranks would say, the first one says
            logging.getLogger("clip_linear").setLevel(logging.WARNING)
        device = pick_device(flags["device"], where, flags["no_set_device_rank"])
        _set_threads(where.local_size)
        if where.world_size == 1:
            return cls(where, device)
        backend = flags["dist_backend"] or ("nccl" if device.type == "cuda" else "gloo")
        url = flags["dist_url"] or _rendezvous(run_dir)
        world = cls(where, device, backend)
        world.rendezvous = Path(url.removeprefix("file://")) if url.startswith("file://") else None
        try:
            dist.init_process_group(
                backend,
                init_method=url,
                rank=where.rank,
                world_size=where.world_size,
                timeout=datetime.timedelta(seconds=RENDEZVOUS_S),
            )
            world.control = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        except (dist.DistError, RuntimeError, ValueError) as error:
            world.forget_rendezvous()
            raise RunError(
                f"rank {where.rank} of {where.world_size} could not meet the others at {url} ({error})"
            ) from error
        return world

    def agree(self, values: list[int]) -> list[int]:
        """The element-wise maximum over all ranks."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control)
        return tensor.tolist()

    def any(self, flag: torch.Tensor) -> torch.Tensor:
        """Whether a 0-d bool tensor is true on any rank; stays on the device."""
        if self.world_size == 1:
            return flag
        number = flag.float()
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return number > 0

    def mean(self, values: list[float]) -> list[float]:
        """The element-wise mean over all ranks, in float64."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.control)
        return (tensor / self.world_size).tolist()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        out: list[Any] = [None] * self.world_size
        dist.all_gather_object(out, value, group=self.control)
        return out

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def wait(self, timeout_s: float = 600.0) -> None:
        """Wait for all ranks, at most ``timeout_s``. Raises RunError."""
        if self.world_size == 1:
            return
        try:
            dist.monitored_barrier(group=self.control, timeout=datetime.timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise RunError(f"rank {self.rank} waited {timeout_s:.0f} s for the others in vain ({error})") from error

    def preflight(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Check within PREFLIGHT_S that the ranks can talk and are alike; returns rank → host and device.

        ``facts`` (code version, run id, shard list …) must be equal on all ranks. Raises RunError naming the rank and
        the fact that differs.
        """
        here = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": _device_name(self.device),
        }
        if self.world_size == 1:
            return [here]
        start = time.monotonic()
        self.wait(PREFLIGHT_S)
        table = self.gather(here | {"facts": facts})
        for row in table:
            for key in facts:
                if row["facts"][key] != table[0]["facts"][key]:
                    raise RunError(
                        f"rank {row['rank']} on {row['host']} has {key} {row['facts'][key]!r}, "
                        f"rank 0 has {table[0]['facts'][key]!r}; all ranks must run the same"
                    )
        one = torch.ones(1, device=self.device)
        dist.all_reduce(one)
        if one.item() != self.world_size:
            raise RunError(f"all-reduce over {self.world_size} ranks gave {one.item()}")
        log.info("%d ranks met in %.1f s over %s", self.world_size, time.monotonic() - start, self.backend)
        return [{k: v for k, v in row.items() if k != "facts"} for row in table]

    def leave(self) -> None:
        """End the process group."""
        if self.world_size > 1 and dist.is_initialized():
            leave_group()
            self.forget_rendezvous()

    def forget_rendezvous(self) -> None:
        """Remove the file by which the ranks met: a later attempt that found it would wait for dead ranks."""
        if self.rendezvous is not None:
            self.rendezvous.unlink(missing_ok=True)


def pick_device(asked: str, where: Place, keep_index: bool) -> torch.device:
    """This rank's device for ``--device``; the CPU where CUDA is asked for and absent. Raises UserError."""
    kind, _, index = asked.partition(":")
    if kind == "cuda" and not torch.cuda.is_available():
        log.info("no CUDA device: training on the CPU")
        return torch.device("cpu")
    if kind not in ("cpu", "cuda"):
        raise UserError(f"--device {asked!r} is not cpu, cuda or cuda:N")
    if kind == "cpu":
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if where.world_size == 1 or keep_index:
        number = int(index or 0)
    else:
        number = 0 if visible == 1 else where.local_rank  # one visible GPU per task: each task's own is number 0
    if number >= visible:
        raise UserError(f"rank {where.rank} wants cuda:{number} but sees {visible} devices; start one task per GPU")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _set_threads(local_size: int) -> None:
    """Use at most this rank's share of the cores; OMP_NUM_THREADS may lower it."""
    share = max(1, available_cores() // max(1, local_size))
    torch.set_num_threads(min(share, int(os.environ.get("OMP_NUM_THREADS") or share)))


def _rendezvous(run_dir: Path) -> str:
    """Where the ranks meet: the launcher's file, else torchrun's store, else a file in the run's folder."""
    if "CLIP_LINEAR_RDZV" in os.environ:
        return os.environ["CLIP_LINEAR_RDZV"]
    if "MASTER_ADDR" in os.environ:
        return "env://"
    slurm = [os.environ.get(k, "0") for k in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    parent = os.getppid()
    key = "-".join(slurm) if "SLURM_JOB_ID" in os.environ else f"{parent}-{_started(parent)}-{attempts_so_far(run_dir)}"
    folder = run_dir.resolve() / "rdzv"
    folder.mkdir(parents=True, exist_ok=True)
    return f"file://{folder / key}"


def _started(pid: int) -> str:
    """When a process started, in clock ticks: makes a pid unique, so that no old rendezvous file is met."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return "0"


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
