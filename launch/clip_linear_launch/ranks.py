"""Which process of a run this is, and the environment that its trainer gets."""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Task:
    """One worker process: the only one of a local run, or one task of a Slurm step."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: str = ""
    nodes: str = ""
    job: str | None = None  # "123" or "123_4"; None: not under Slurm
    raw_job: str | None = None  # the numeric id of this array element
    restart: int = 0

    def record(self) -> dict[str, Any]:
        """What attempts.jsonl keeps of it."""
        return {"job": self.job, "raw_job": self.raw_job, "restart": self.restart, "nodes": self.nodes}


def here() -> Task:
    """This process's task, from Slurm's environment (of a step, not of a mere allocation) or alone."""
    env = os.environ
    if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env:
        node = socket.gethostname()
        return Task(node=node, nodes=node)
    job = env["SLURM_JOB_ID"]
    array, index = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    return Task(
        rank=int(env["SLURM_PROCID"]),
        world_size=int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or 1),
        local_rank=int(env.get("SLURM_LOCALID") or 0),
        local_size=_first_int(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "1"),
        node=env.get("SLURMD_NODENAME") or socket.gethostname(),
        nodes=env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "",
        job=f"{array}_{index}" if array and index else job,
        raw_job=job,
        restart=int(env.get("SLURM_RESTART_COUNT") or 0),
    )


def _first_int(text: str) -> int:
    match = re.match(r"\d+", text)
    return int(match.group()) if match else 1


def port(key: str) -> int:
    """A rendezvous port for a job and attempt: below 32768, where no outgoing connection takes one by chance."""
    return 20000 + zlib.crc32(key.encode()) % 12000


def children(run_dir: Path, run: dict[str, Any], task: Task) -> Iterator[tuple[dict[str, str], int]]:
    """The environment of each trainer process this worker starts, with its rank.

    Under Slurm a worker starts one; alone it starts all ranks of a one-node run, as torchrun would. Every attempt
    has a rendezvous of its own (a file in the run's folder, and a port), so nothing of an earlier one can be met.
    """
    local = task.job is None
    world = int(run.get("resources", {}).get("tasks_per_node") or run.get("resources", {}).get("gpus_per_node") or 1)
    world = world if local else task.world_size
    key = f"{task.job}-{task.restart}" if task.job else f"{os.getpid()}-{len(os.listdir(run_dir))}"
    base = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SUBMITIT_", "PMI", "TORCHELASTIC_"))}
    base.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads cost several times on a shared machine
    cpus = run.get("resources", {}).get("cpus_per_task")
    if cpus:
        base.setdefault("OMP_NUM_THREADS", str(cpus))
    base["PYTHONUNBUFFERED"] = "1"
    base["CLIP_LINEAR_RUN"] = str(run_dir)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        base.pop(name, None)  # stale ones would win
    if world == 1:
        yield base, 0
        return
    store = run_dir / "rdzv" / key
    store.parent.mkdir(exist_ok=True)
    base |= {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world if local else task.local_size),
        "MASTER_ADDR": "127.0.0.1" if local else first_node(task.nodes),
        "MASTER_PORT": str(port(f"{run_dir}{key}")),
        "CLIP_LINEAR_RDZV": f"file://{store}",
    }
    for i in range(world if local else 1):
        rank, local_rank = (i, i) if local else (task.rank, task.local_rank)
        yield base | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}, rank


def first_node(nodelist: str) -> str:
    """The first host of a Slurm node list: ``node[01-04,7]`` → ``node01``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodelist)
    return (match.group(1) + (match.group(2) or "")) if match else "127.0.0.1"
