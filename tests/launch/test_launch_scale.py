"""Large sweeps: planning at LAION-400M scale, the state of a thousand runs, a simulation checked by hand."""

import json
import math
import time

import pytest

from clip_linear.errors import UserError
from clip_linear_launch import budget, layout, simulate, status
from clip_linear_launch.expand import expand
from clip_linear_launch.simulate import Cluster, Job, attempt
from clip_linear_launch.sweep import load

LAION = """
[sweep]
name = "laion400m"
backend = "slurm"
[base]
train-data = "s3://laion400m/{00000..41454}.tar"
precision = "amp_bf16"
batch-size = 64
[grid]
model = ["ViT-B-32", "ViT-B-16", "ViT-L-16"]
image = ["softmax", "mala", "elu", "affine_eq7"]
samples = [1.28e9, 3.072e9, 1.28e10]
seed = [0, 1]
[per_model."ViT-L-16"]
nodes = 128
[resources]
nodes = 16
gpus_per_node = 4
time = "1-00:00:00"
[hardware]
name = "A100"
peak_tflops = 312
mfu = 0.35
"""


@pytest.fixture
def laion(tmp_path):
    path = tmp_path / "laion.toml"
    path.write_text(LAION)
    return path


def test_planning_laion_400m_takes_seconds(laion):
    start = time.monotonic()
    sweep = load(laion)
    runs = expand(sweep)
    costs = budget.costs(sweep, runs)
    simulate.report(sweep, runs, costs, ["nodes=512"])
    assert time.monotonic() - start < 5
    assert len(runs) == 72 and max(r.resources.world_size for r in runs) == 512


def test_cost_agrees_with_what_was_recorded(laion):
    # ViT-B/32 on 12.8e9 samples: 5.7e20 FLOP; Cherti et al. recorded 8.6 thousand GPU-hours, about 6 % of the peak.
    sweep = load(laion)
    runs = [r for r in expand(sweep) if r.base == "ViT-B-32" and r.image == "softmax" and r.samples == 12_800_000_000]
    cost = budget.costs(sweep, runs)[0]
    assert cost.flops == pytest.approx(5.7e20, rel=0.01)
    assert cost.gpu_hours == pytest.approx(cost.flops / (312e12 * 0.35) / 3600)
    laion.write_text(LAION.replace("mfu = 0.35", "mfu = 0.059"))
    assert budget.costs(load(laion), runs)[0].gpu_hours == pytest.approx(8600, rel=0.02)


def test_measured_speed_wins_over_the_peak(laion):
    (laion.parent / "bench.csv").write_text(
        "model,metric,value,device,date\nViT-B-32+mala+mala,samples_per_s,1000,A100,2\n"
        "ViT-B-32+mala+mala,samples_per_s,5,A100,1\nViT-B-32+mala+mala,samples_per_s,9,H100,3\n"
    )
    (laion.parent / "earlier.csv").write_text(  # of a sweep that was collected: four GPUs together
        "model,metric,value,device,date,samples_per_sec,gpus\nViT-B-16+mala+mala,top1,0.5,A100,1,800,4\n"
    )
    laion.write_text(LAION + 'bench_rows = ["bench.csv", "earlier.csv"]\n')
    sweep = load(laion)
    runs = expand(sweep)
    for run, cost in zip(runs, budget.costs(sweep, runs)):
        if run.model in ("ViT-B-32+mala+mala", "ViT-B-16+mala+mala"):
            rate = 1000 if run.base == "ViT-B-32" else 200
            assert cost.gpu_hours == run.samples / rate / 3600 and "measured" in cost.source
        else:
            assert "MFU" in cost.source


def test_a_sweep_above_its_gpu_hours_is_refused(laion):
    laion.write_text(LAION + "[limits]\nmax_gpu_hours = 1000\n")
    sweep = load(laion)
    runs = expand(sweep)
    with pytest.raises(UserError, match="max_gpu_hours = 1000"):
        budget.refuse_above_limit(sweep, runs, yes=False)
    budget.refuse_above_limit(sweep, runs, yes=True)
    laion.write_text(LAION.split("[hardware]")[0] + "[limits]\nmax_gpu_hours = 1000\n")
    with pytest.raises(UserError, match="not known"):
        budget.refuse_above_limit(load(laion), runs, yes=False)


def test_the_state_of_a_thousand_runs_takes_under_two_seconds(bench, monkeypatch):
    seeds = list(range(1000))
    bench.write(grid=f'model = ["ViT-S-32"]\nimage = ["softmax"]\nseed = {seeds}', sweep='backend = "slurm"')
    sweep = load(bench.toml)
    for i, run in enumerate(runs := expand(sweep)):
        folder = bench.sweep / "runs" / run.run_id
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(layout.record(sweep, run)))
        (folder / "submitted.json").write_text(json.dumps({"job": f"77_{i}", "t": time.time()}))
        if i % 2:
            (folder / "done.json").write_text('{"step": 5}')
        else:
            (folder / "state.json").write_text(json.dumps({"step": 3, "t": time.time(), "state": "RUNNING"}))
            (folder / "attempts.jsonl").write_text(json.dumps({"attempt": 1, "start": time.time(), "job": f"77_{i}"}))
    (bench.sweep / "sweep.json").write_text(json.dumps({"runs": [r.run_id for r in runs]}))
    shim = bench.folder / "bin"
    shim.mkdir()
    lines = "\n".join(f"77_{i}|RUNNING|None|node1|clip-mini" for i in range(0, 1000, 2))
    (shim / "squeue").write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\n")
    (shim / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{shim}:/usr/bin:/bin")
    start = time.monotonic()
    seen = status.statuses(bench.sweep)
    assert time.monotonic() - start < 2
    assert [s.state for s in seen] == ["RUNNING", "DONE"] * 500 and seen[0].node == "node1"


def test_one_attempt_by_hand():
    c = Cluster(checkpoint_s=100, save_s=10, restart_s=50)
    never = math.inf
    # 250 s of work: 50 to start, 100, save 10, 100, save 10, 50: no save at the end, the trainer's own is the work's.
    assert attempt(250, Job(1, 1, 250), c, never, never) == (320, 250, 0, 70)
    # A failure at 200 s: 50 to start, 100 saved (160), 40 done since: lost.
    assert attempt(250, Job(1, 1, 250), c, never, 200) == (200, 100, 40, 60)
    # A preemption there loses nothing, but saves once more.
    assert attempt(250, Job(1, 1, 250), c, 200, never) == (210, 140, 0, 70)
    # The time limit does the same.
    assert attempt(250, Job(1, 1, 250, limit_s=220, delay_s=20), c, never, never) == (210, 140, 0, 70)
    # A failure while it starts: nothing done, nothing lost.
    assert attempt(250, Job(1, 1, 250), c, never, 30) == (30, 0, 0, 30)


def test_a_small_sweep_by_hand():
    quiet = Cluster(nodes=2, preempt_per_node_day=0, fail_per_node_day=0, queue_s=10, restart_s=5, checkpoint_s=1e9)
    # Three runs of 100 s on two nodes: two waves of 105 s after the queue.
    out = simulate.simulate([Job(1, 4, 100)] * 3, quiet)
    assert (out.wall_s, out.attempts, out.useful, out.lost, out.overhead) == (220, 3, 1200, 0, 60)
    # A wide one waits until both nodes are free.
    assert simulate.simulate([Job(1, 1, 100), Job(2, 2, 50)], quiet).wall_s == 10 + 105 + 55
    # A limit of 65 s leaves 60 s of work an attempt: 60, a save of 30 s, the queue, then the other 40.
    out = simulate.simulate([Job(1, 1, 100, limit_s=65)], quiet)
    assert (out.wall_s, out.attempts, out.overhead) == (10 + 65 + 30 + 10 + 45, 2, 5 + 30 + 5)


def test_more_failures_cost_more_and_seeds_repeat():
    jobs = [Job(4, 16, 5e5)] * 48  # three full waves
    base = Cluster(nodes=64, preempt_per_node_day=1.0)
    calm = simulate.simulate(jobs, Cluster(nodes=64, preempt_per_node_day=0, fail_per_node_day=0))
    rough = simulate.simulate(jobs, base)
    assert rough.wall_s > calm.wall_s and rough.attempts > calm.attempts == 48
    assert rough.useful == pytest.approx(calm.useful) and calm.lost == 0
    assert simulate.simulate(jobs, base) == rough


@pytest.mark.parametrize(
    ("pairs", "says"), [(["node=3"], "nodes"), (["nodes=x"], "number"), (["nodes=0"], "above zero")]
)
def test_mistakes_in_a_simulation_are_named(pairs, says):
    with pytest.raises(UserError, match=says):
        simulate.parse(pairs)
    with pytest.raises(UserError, match="wants 9 nodes"):
        simulate.simulate([Job(9, 9, 1)], Cluster(nodes=8))
    with pytest.raises(UserError, match="time limit"):
        simulate.simulate([Job(1, 1, 1, limit_s=10)], Cluster())
