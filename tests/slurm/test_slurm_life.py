"""What clusters do to jobs: time limits, preemption, requeues, dead nodes and ranks. Nothing is lost or repeated."""

import itertools
import subprocess
from pathlib import Path

import pytest

from tests.slurm.cluster import expected_total, slurm

pytestmark = pytest.mark.slurm


def classes(cluster):
    return [a["class"] for a in cluster.attempts()]


def finished_exactly(cluster, steps, timeout_s=150):
    """The run is done, and every step was made once: a lost or repeated one would change the sum."""
    cluster.wait_for("DONE", timeout_s=timeout_s)
    rows = cluster.attempts()
    assert cluster.total() == expected_total(steps)
    assert all(later["start_step"] <= earlier["end_step"] for earlier, later in itertools.pairwise(rows))
    return rows


def test_usr2_saves_requeues_and_continues(cluster):
    cluster.write(how="step_s=0.1,save_every=1000", samples=64 * 100)
    cluster.launch("run")
    cluster.wait_for_step(5)
    slurm("scancel", "--signal=USR2", cluster.job())
    cluster.until(lambda: len(cluster.attempts()) == 2, "the second attempt", 90)
    assert cluster.status()[0]["state"] in ("RUNNING", "DONE")
    rows = finished_exactly(cluster, 100)
    assert classes(cluster) == ["timeout", "done"] and rows[1]["restart"] == 1
    assert rows[0]["job"] == rows[1]["job"] and rows[1]["start_step"] == rows[0]["end_step"] >= 5


def test_while_it_waits_to_start_again_nobody_submits_it_twice(cluster):
    cluster.write(how="step_s=0.1", samples=64 * 60)
    cluster.launch("run")
    cluster.wait_for_step(2)
    slurm("scancel", "--signal=USR2", cluster.job())
    cluster.until(lambda: cluster.status()[0]["state"] == "REQUEUED", "REQUEUED", 60)
    assert "0 to start" in cluster.launch("run")
    finished_exactly(cluster, 60)


@pytest.mark.timeout(400)
def test_the_real_time_limit(cluster):
    # One minute, and Slurm signals 25 s before it, or up to a minute early.
    cluster.write(
        how="step_s=0.5,save_every=1000", samples=64 * 100, resources="time = 1", limits="signal_delay_s = 25"
    )
    cluster.launch("run")
    rows = finished_exactly(cluster, 100, timeout_s=300)
    assert len(rows) >= 2 and set(classes(cluster)[:-1]) == {"timeout"}
    assert all(r["end"] - r["start"] < 60 for r in rows)


def test_preemption_by_a_higher_partition(cluster):
    cluster.write(
        how="step_s=0.2,save_every=1000",
        samples=64 * 100,
        resources='partition = "low"\nnodelist = "node3"\ncpus_per_task = 8',
    )
    cluster.launch("run")
    cluster.wait_for_step(3)
    slurm("sbatch", "-p", "high", "-w", "node3", "-c", "8", "-t", "1", "-o", "/dev/null", "--wrap", "sleep 1")
    rows = finished_exactly(cluster, 100)
    assert len(rows) == 2 and rows[0]["class"] in ("timeout", "stopped") and rows[1]["start_step"] >= 3


def test_requeue_from_outside_terminates_saves_and_continues(cluster):
    cluster.write(how="step_s=0.1,save_every=1000", samples=64 * 100)
    cluster.launch("run")
    cluster.wait_for_step(3)
    slurm("scontrol", "requeue", cluster.job())
    rows = finished_exactly(cluster, 100)
    assert classes(cluster) == ["stopped", "done"] and rows[1]["start_step"] == rows[0]["end_step"]


def test_a_slow_scontrol_does_not_lose_the_requeue(cluster):
    # The step is terminated while scontrol still waits for its answer.
    shim = cluster.shim("scontrol", 'scontrol "$@"; code=$?; sleep 2; exit $code')
    cluster.write(how="step_s=0.1,save_every=1000", samples=64 * 60, resources=f'setup = ["export PATH={shim}:$PATH"]')
    cluster.launch("run")
    cluster.wait_for_step(2)
    slurm("scancel", "--signal=USR2", cluster.job())
    rows = finished_exactly(cluster, 60)
    assert [r["job"] for r in rows] == [cluster.job()] * 2 and classes(cluster) == ["timeout", "done"]


def test_without_scontrol_on_the_node_the_next_run_continues(cluster):
    shim = cluster.shim("scontrol", "exit 127")
    cluster.write(how="step_s=0.1,save_every=1000", samples=64 * 60, resources=f'setup = ["export PATH={shim}:$PATH"]')
    cluster.launch("run")
    cluster.wait_for_step(2)
    slurm("scancel", "--signal=USR2", cluster.job())
    (status,) = cluster.wait_for("INTERRUPTED")
    assert status["reason"].startswith("time limit")
    first = cluster.job()
    assert "1 to start" in cluster.launch("run")
    rows = finished_exactly(cluster, 60)
    assert rows[0]["job"] == first != rows[1]["job"]


def test_no_progress_ends_in_failed(cluster):
    cluster.write(how="stuck=1,step_s=0.1")
    cluster.launch("run")
    log = cluster.run_dir() / "log" / "rank-0.log"

    def lives():
        return log.read_text().count("starts at step 0") if log.exists() else 0

    for attempt in (1, 2):
        cluster.until(lambda n=attempt: lives() == n, "the trainer", 90)
        slurm("scancel", "--signal=USR2", cluster.job())
        cluster.until(lambda n=attempt: cluster.attempts()[n - 1].get("class"), "the end of the attempt", 60)
    (status,) = cluster.wait_for("FAILED")
    assert "no progress: 2 time-outs in a row" in status["reason"]
    assert "0 to start" in cluster.launch("run")


@pytest.mark.timeout(400)
def test_a_dead_node(cluster):
    cluster.write(how="step_s=0.2,save_every=1", samples=64 * 100, resources='nodelist = "node4"')
    cluster.launch("run")
    cluster.wait_for_step(3)
    kill_node("node4", cluster)
    try:
        cluster.until(
            lambda: "node4" not in slurm("squeue", "-h", "-o", "%N", "-j", cluster.job().split("_")[0], check=False),
            "node loss",
            120,
            0.5,
        )
        said = slurm("squeue", "-t", "all", "-o", "%i|%T|%r|%N|%e", "-j", cluster.job().split("_")[0], check=False)
        assert cluster.status()[0]["state"] in ("REQUEUED", "PENDING"), said
        assert "0 to start" in cluster.launch("run")
    finally:
        revive_node("node4")

    # Slurm was seen to kill the requeued job's step ten seconds after the node's return; it calls that a failure and
    # requeues it no more. Then the next `run` must go on.
    def ended():
        (status,) = cluster.status()
        if status["state"] == "INTERRUPTED":
            assert "1 to start" in cluster.launch("run")
        return status["state"] == "DONE"

    cluster.until(ended, "the end of the run", 250, 1.0)
    finished_exactly(cluster, 100)
    *earlier, last = classes(cluster)
    assert last == "done" and set(earlier) == {"infrastructure"}
    assert "killed together with its worker" in cluster.attempts()[0]["reason"]


def kill_node(node, cluster):
    """The node is gone with everything on it: its daemon, and its job's processes with the step daemons above them."""
    mark = f"SLURM_JOB_ID={cluster.attempts()[-1]['raw_job']}".encode()
    step_daemons, doomed = set(), set()
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (proc / "environ").read_bytes().split(b"\0"):
                parent = (proc / "stat").read_text().rpartition(")")[2].split()[1]
                doomed.add(proc.name)
                if Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd"):
                    step_daemons.add(parent)
        except OSError:  # it ended meanwhile
            continue
    assert doomed, "the job has no process here"
    daemon = Path(f"/var/lib/slurm-sbx/run/slurmd-{node}.pid").read_text().strip()
    # The daemons first: a step daemon that sees its processes die tells Slurm that the job failed.
    subprocess.run(["kill", "-9", daemon, *sorted(step_daemons), *sorted(doomed - step_daemons)], check=False)


def revive_node(node):
    env = {"SLURM_CONF": "/var/lib/slurm-sbx/etc/slurm.conf", "PATH": "/usr/sbin:/usr/bin:/bin"}
    subprocess.run(["slurmd", "-N", node, "-f", env["SLURM_CONF"]], env=env, check=True, capture_output=True)
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], env=env, capture_output=True)


def test_one_dead_rank_ends_the_step_and_the_next_run_retries(cluster):
    cluster.write(how="step_s=0.1,kill_at=3,rank=1", samples=128 * 600, resources="tasks_per_node = 2")
    cluster.launch("run")
    (status,) = cluster.wait_for("FAILED", timeout_s=60)
    assert "SIGKILL" in status["reason"]
    assert "1 to start" in cluster.launch("run")
    cluster.until(lambda: len(cluster.attempts()) == 2, "the second attempt", 60)
    first, second = cluster.attempts()[:2]
    assert first["class"] == "infrastructure" and first["nodes"] != second["nodes"]  # retried elsewhere


def test_two_nodes_rank_by_rank(cluster):
    # The stand-in's first rank does not wait for the second, which finds nothing to do where it comes too late.
    cluster.write(how="step_s=3", samples=128 * 5, resources="nodes = 2")
    cluster.launch("run")
    cluster.wait_for("DONE")
    logs = [(cluster.run_dir() / "log" / f"rank-{i}.log").read_text() for i in range(2)]
    assert "rank 0/2" in logs[0] and "rank 1/2" in logs[1]
    assert {log.split(" on ")[1].split(":")[0] for log in logs} == {"node1", "node2"}
    assert cluster.attempts()[0]["nodes"] == "node[1-2]"
