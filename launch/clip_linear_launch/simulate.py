"""A sweep replayed against a model cluster: how long it takes, what is wasted, what the checkpoint interval costs.

The model: an attempt waits ``queue_s``, starts when its nodes are free (first come, first fit), spends ``restart_s``,
then works; every ``checkpoint_s`` of work costs ``save_s``. It ends when the work is done, at the time limit less the
signal delay, at a preemption (both save first: ``save_s``, nothing is lost) or at a node failure (the work since the
last checkpoint is lost). Preemptions and failures are Poisson per node. An interrupted run queues again at the end.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections import deque
from dataclasses import dataclass

from clip_linear.errors import UserError, unknown
from clip_linear_launch.budget import Cost
from clip_linear_launch.commands.tables import duration, table
from clip_linear_launch.expand import Run
from clip_linear_launch.sweep import Sweep

_INTERVALS_S = (300.0, 900.0, 1800.0, 3600.0, 7200.0, 14400.0)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The model cluster; what ``plan --simulate KEY=VALUE`` sets."""

    nodes: int = 64
    preempt_per_node_day: float = 0.5
    fail_per_node_day: float = 0.01
    queue_s: float = 600.0
    restart_s: float = 120.0
    checkpoint_s: float = 1800.0
    save_s: float = 30.0
    seed: int = 0


@dataclass(frozen=True)
class Job:
    """A run: its nodes, GPUs in all, seconds of pure work, and what one attempt may last."""

    nodes: int
    gpus: int
    work_s: float
    limit_s: float = math.inf
    delay_s: float = 0.0


@dataclass
class Outcome:
    """Seconds of wall-clock and GPU-seconds, useful and not."""

    wall_s: float = 0.0
    useful: float = 0.0
    lost: float = 0.0  # work that a failure undid
    overhead: float = 0.0  # starting and saving
    attempts: int = 0


def attempt(
    work_s: float, job: Job, cluster: Cluster, preempt_s: float, fail_s: float
) -> tuple[float, float, float, float]:
    """One attempt with ``work_s`` left: (seconds it holds its nodes, work kept, work lost, seconds of overhead).

    ``preempt_s`` and ``fail_s``: when these would strike, in seconds after the start.
    """
    pace = cluster.checkpoint_s + cluster.save_s  # one period: work, then a save
    saves = max(0, math.ceil(work_s / cluster.checkpoint_s) - 1)
    finish = cluster.restart_s + work_s + saves * cluster.save_s
    stop = min(job.limit_s - job.delay_s, preempt_s)
    if finish <= min(stop, fail_s):
        return finish, work_s, 0.0, finish - work_s
    end = min(stop, fail_s)
    active = max(0.0, end - cluster.restart_s)
    periods = math.floor(active / pace)
    done = min(work_s, periods * cluster.checkpoint_s + min(active - periods * pace, cluster.checkpoint_s))
    if fail_s <= stop:
        kept = min(done, periods * cluster.checkpoint_s)
        return end, kept, done - kept, end - done
    return end + cluster.save_s, done, 0.0, end + cluster.save_s - done


def simulate(jobs: list[Job], cluster: Cluster) -> Outcome:
    """Play all jobs to their end. Raises UserError when one can never finish (too wide, or its limit too short)."""
    random_ = random.Random(cluster.seed)
    out = Outcome()
    left = [job.work_s for job in jobs]
    for job in jobs:
        if job.nodes > cluster.nodes:
            raise UserError(f"a run wants {job.nodes} nodes, the model cluster has {cluster.nodes}; add nodes=N")
        if job.limit_s - job.delay_s <= cluster.restart_s:
            raise UserError("the time limit less signal_delay_s is not above restart_s: no run would ever make a step")
    arriving = [(cluster.queue_s, i) for i in range(len(jobs))]  # a heap: all at one time
    running: list[tuple[float, int]] = []
    waiting: deque[int] = deque()
    free, now = cluster.nodes, 0.0
    while arriving or waiting or running:
        now = min([heap[0][0] for heap in (arriving, running) if heap])
        while running and running[0][0] <= now:
            _, i = heapq.heappop(running)
            free += jobs[i].nodes
            if left[i] > 1e-9:
                heapq.heappush(arriving, (now + cluster.queue_s, i))
            else:
                out.wall_s = now
        while arriving and arriving[0][0] <= now:
            waiting.append(heapq.heappop(arriving)[1])
        skipped: list[int] = []
        while waiting and free > 0:
            i = waiting.popleft()
            if jobs[i].nodes > free:
                skipped.append(i)
                continue
            free -= jobs[i].nodes
            preempt = _next(random_, cluster.preempt_per_node_day * jobs[i].nodes)
            fail = _next(random_, cluster.fail_per_node_day * jobs[i].nodes)
            held, kept, lost, overhead = attempt(left[i], jobs[i], cluster, preempt, fail)
            left[i] -= kept
            out.attempts += 1
            out.useful += kept * jobs[i].gpus
            out.lost += lost * jobs[i].gpus
            out.overhead += overhead * jobs[i].gpus
            heapq.heappush(running, (now + held, i))
        waiting.extendleft(reversed(skipped))
    return out


def _next(random_: random.Random, per_day: float) -> float:
    return random_.expovariate(per_day / 86400) if per_day > 0 else math.inf


def parse(pairs: list[str], cluster: Cluster | None = None) -> Cluster:
    """``nodes=32 checkpoint_s=600 …`` as a cluster. Raises UserError."""
    cluster = cluster or Cluster()
    fields = {f.name: f.type for f in dataclasses.fields(Cluster)}
    values: dict[str, float | int] = {}
    for pair in pairs:
        key, _, text = pair.partition("=")
        if key not in fields:
            raise unknown("key of --simulate", key, fields, "write KEY=VALUE")
        try:
            number = int(text) if fields[key] == "int" else float(text)
        except ValueError:
            raise UserError(f"--simulate {pair!r}: {text!r} is not a number") from None
        if number < 0 or (number == 0 and key in ("nodes", "checkpoint_s")):
            raise UserError(f"--simulate {pair!r} must be above zero")
        values[key] = number
    return dataclasses.replace(cluster, **values)  # type: ignore[arg-type]


def report(sweep: Sweep, runs: list[Run], costs: list[Cost], pairs: list[str]) -> str:
    """A table over checkpoint intervals for a sweep on a model cluster. Raises UserError without known GPU-hours."""
    cluster = parse(pairs)
    jobs = []
    for run, cost in zip(runs, costs):
        if cost.gpu_hours is None:
            raise UserError("--simulate needs GPU-hours; give [hardware] peak_tflops or bench_rows")
        r = run.resources
        gpus = r.nodes * max(1, r.gpus_per_node)
        limit = r.time_s or math.inf
        jobs.append(Job(r.nodes, gpus, cost.gpu_hours * 3600 / gpus, limit, float(sweep.limits.signal_delay_s)))
    rows = []
    for interval in sorted({*_INTERVALS_S, cluster.checkpoint_s}):
        out = simulate(jobs, dataclasses.replace(cluster, checkpoint_s=interval))
        total = out.useful + out.lost + out.overhead
        rows.append(
            (
                duration(interval) + (" <" if interval == cluster.checkpoint_s else ""),
                duration(out.wall_s),
                out.attempts,
                out.useful / 3600,
                out.lost / 3600,
                out.overhead / 3600,
                f"{100 * (total - out.useful) / total:.2f}%" if total else "-",
            )
        )
    header = ("checkpoint every", "wall-clock", "attempts", "useful GPU-h", "lost GPU-h", "overhead GPU-h", "wasted")
    settings = ", ".join(f"{k} {v:g}" for k, v in dataclasses.asdict(cluster).items())
    return f"simulated on a model cluster ({settings}):\n{table(header, rows)}"
