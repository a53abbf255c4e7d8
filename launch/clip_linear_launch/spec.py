"""The fields of a sweep file, one dataclass a table; launch/README.md documents the same fields with examples."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from clip_linear.errors import UserError, unknown

BACKENDS = ("local", "slurm", "auto")


@dataclass(frozen=True, kw_only=True)
class SweepHead:
    """``[sweep]``"""

    name: str
    root: str = "sweeps"  # the sweep's folder is root/name
    folder: str | None = None  # the sweep's folder itself, instead of root/name
    backend: str = "local"  # local | slurm | auto (auto prints its choice)
    profile: str | None = None  # a TOML file with [resources], [limits], [hardware] of a site; or its name in profiles/
    budget: dict[str, Any] = field(default_factory=dict)  # {samples = …} or {gmacs_total = …} for every run
    # What gets the train flags and --run-dir; e.g. a profiler before it. "python" is the worker's own Python.
    command: list[str] = field(default_factory=lambda: ["python", "-m", "clip_linear", "train"])


@dataclass(frozen=True, kw_only=True)
class Resources:
    """``[resources]``: what one run gets. Everything but nodes, tasks, cpus_per_task, time and python is Slurm's."""

    nodes: int = 1
    gpus_per_node: int = 0
    tasks_per_node: int | None = None  # processes on a node; default: one per GPU, one without GPUs
    cpus_per_task: int | None = None
    mem_gb: float | None = None  # of a node
    time: str | int | None = None  # "D-HH:MM:SS", "HH:MM:SS", "MM:SS" or minutes; required by Slurm
    partition: str | None = None
    qos: str | None = None
    account: str | None = None
    constraint: str | None = None
    exclude: list[str] = field(default_factory=list)  # nodes that are never used
    nodelist: str | None = None
    reservation: str | None = None
    comment: str | None = None
    mail_type: str | None = None
    mail_user: str | None = None
    exclusive: bool = False
    setup: list[str] = field(default_factory=list)  # shell lines before the run: module load, source env.sh
    python: str | None = None  # the command that starts Python, e.g. a container's; default: the launcher's own
    srun_args: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)  # any other sbatch option: {"gres-flags" = "enforce-binding"}

    @property
    def tasks(self) -> int:
        """Processes (ranks) on one node."""
        return self.tasks_per_node or max(1, self.gpus_per_node)

    @property
    def world_size(self) -> int:
        """Processes (ranks) of one run."""
        return self.nodes * self.tasks

    @property
    def time_s(self) -> int | None:
        """The time limit in seconds."""
        return None if self.time is None else seconds(self.time)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """``[limits]``"""

    max_parallel: int = 1  # local queue: runs at a time
    array_parallelism: int = 64  # Slurm: elements of one array that run at a time
    max_retries: int = 2  # resubmissions after infrastructure failures (node, network, killed); never after an error
    max_timeouts: int = 2  # time-outs in a row without a step of progress before the run is FAILED
    max_gpu_hours: float | None = None  # `plan` and `run` refuse a costlier sweep without --yes
    signal_delay_s: int = 120  # the run is told to save this long before its time limit
    stale_s: int = 600  # a heartbeat older than this is called STALE


@dataclass(frozen=True, kw_only=True)
class Eval:
    """``[eval]``: measured by each run when it has trained."""

    datasets: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """``[hardware]``: for GPU-hours. Measured rows win over peak × MFU."""

    name: str | None = None
    peak_tflops: float | None = None  # of one GPU, at the precision that is trained in
    mfu: float = 0.35  # the share of the peak that training reaches
    bench_rows: list[str] = field(default_factory=list)  # rows with metric samples_per_s, or an earlier sweep's


T = TypeVar("T")


def build(cls: type[T], table: Any, where: str) -> T:
    """A dataclass of this module from a TOML table. Raises UserError for unknown, missing and mistyped keys."""
    if not isinstance(table, dict):
        raise UserError(f"{where} must be a table, not {table!r}")
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    for key in table:
        if key not in hints:
            raise unknown(f"key in {where}", key, hints, "see launch/README.md")
    for f in fields:
        if f.name in table:
            check(hints[f.name], table[f.name], f"{where} {f.name}")
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise UserError(f"{where} lacks {f.name!r}; add it")
    return cls(**table)


def check(kind: Any, value: Any, where: str) -> None:
    """Raise UserError unless a TOML value is of an annotated type (int passes for float, bool never for int)."""
    if isinstance(kind, types.UnionType):
        kinds = [k for k in typing.get_args(kind) if k is not type(None)]
    else:
        kinds = [kind]
    for k in kinds:
        origin = typing.get_origin(k) or k
        if isinstance(value, bool) and origin is not bool:
            continue
        if isinstance(value, origin) or (origin is float and isinstance(value, int)):
            if origin is list and isinstance(value, list):
                for item in value:
                    check(typing.get_args(k)[0], item, where)
            return
    names = " or ".join(getattr(typing.get_origin(k) or k, "__name__", str(k)) for k in kinds)
    raise UserError(f"{where} = {value!r} is not a {names}")


def seconds(time: str | int) -> int:
    """Seconds of a Slurm time: minutes (int or "90"), "MM:SS", "HH:MM:SS", "D-HH", "D-HH:MM", "D-HH:MM:SS"."""
    text = str(time).strip()
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not match:
        raise UserError(f'time {time!r} is not a Slurm time; write "HH:MM:SS", "D-HH:MM:SS" or minutes')
    days, *parts = match.groups()
    given = [int(p) for p in parts if p is not None]
    if days is not None:
        h, m, s = [*given, 0, 0][:3]
        total = int(days) * 86400 + h * 3600 + m * 60 + s
    elif len(given) == 3:
        total = given[0] * 3600 + given[1] * 60 + given[2]
    else:
        total = given[0] * 60 + (given[1] if len(given) == 2 else 0)
    if total <= 0:
        raise UserError(f"time {time!r} is not above zero; Slurm would never start such a job")
    return total
