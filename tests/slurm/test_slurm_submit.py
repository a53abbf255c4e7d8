"""Submitting to a real Slurm: arrays, refusals, limits, a launcher that is killed, a launcher inside a job."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.slurm.cluster import slurm

pytestmark = pytest.mark.slurm
FOUR = 'model = ["ViT-S-32"]\nimage = ["softmax"]\nseed = [0, 1, 2, 3]'


def overlap(cluster):
    """How many runs ran at the same time, at most."""
    spans = [(a["start"], a["end"]) for d in cluster.runs() for a in cluster.attempts(d)]
    return max(sum(s <= start < e for s, e in spans) for start, _ in spans)


def test_an_array_with_parallelism_then_a_no_op(cluster):
    cluster.write(grid=FOUR, how="step_s=0.3", limits="array_parallelism = 2")
    assert "start at" in cluster.launch("plan", "--test-only")
    assert "submitted 4 runs as job" in cluster.launch("run")
    assert "0 to start" in cluster.launch("run")
    assert len({cluster.job(d).split("_")[0] for d in cluster.runs()}) == 1
    done = cluster.wait_for("DONE")
    assert all(s["attempts"] == 1 and s["step"] == 5 for s in done)
    assert overlap(cluster) == 2
    assert "4 DONE; 0 to start" in cluster.launch("run")
    assert "4 rows" not in cluster.launch("collect") and (cluster.sweep / "rows.csv").exists()


def test_failing_python_is_told_and_not_retried(cluster):
    cluster.write(how="fail_at=2")
    cluster.launch("run")
    (status,) = cluster.wait_for("FAILED")
    assert "ZeroDivisionError: planned" in status["reason"]
    assert "0 to start" in cluster.launch("run")
    assert "planned" in cluster.launch("logs")
    assert "1 to start" in cluster.launch("retry")
    cluster.wait_for("DONE")
    assert [a["class"] for a in cluster.attempts()] == ["error", "done"]


@pytest.mark.parametrize(
    ("resources", "says"),
    [
        ('partition = "nowhere"', "invalid partition"),
        ('constraint = "unicorn"', "feature"),
        ("nodes = 77", "processors"),
        ("gpus_per_node = 8", "node configuration"),
        ('time = "40-00:00:00"', "time limit"),
    ],
)
def test_what_slurm_refuses_is_one_line_and_leaves_nothing(cluster, resources, says):
    cluster.write(grid=FOUR, resources=resources)
    out = cluster.launch("run", code=2)
    assert says in out.lower() and "Slurm refused" in out
    assert len(out.splitlines()) == 2  # how many runs there are, and the refusal
    assert not list((cluster.sweep / "submitit").rglob("*.pkl")) and not list((cluster.sweep / "submits").glob("*"))
    assert all(s["state"] == "NEW" for s in cluster.status())
    assert says in cluster.launch("plan", "--test-only", code=2).lower()


def test_cancelled_stays_cancelled(cluster):
    cluster.write(grid=FOUR, how="step_s=0.2", samples=64 * 500, limits="array_parallelism = 2")
    cluster.launch("run")
    cluster.until(lambda: any(cluster.step(d) for d in cluster.runs()), "a step", 60)
    assert "4 runs cancelled" in cluster.launch("cancel")
    jobs = [cluster.job(d) for d in cluster.runs()]

    def gone():
        return not slurm("squeue", "-h", "-t", "PD,R,CG", "-j", jobs[0].split("_")[0], check=False).strip()

    cluster.until(gone, "the end of the jobs", 60, every_s=0.5)
    steps = [cluster.step(d) for d in cluster.runs()]
    assert "0 to start" in cluster.launch("run") and "0 to start" in cluster.launch("retry")
    started = next(d for d in cluster.runs() if cluster.attempts(d))
    slurm("scontrol", "requeue", cluster.job(started), check=False)  # somebody revives a job from outside

    def ended():
        return "COMPLETED" in slurm("sacct", "-n", "-X", "-P", "-o", "State", "-j", cluster.job(started))

    cluster.until(ended, "the revived job to end without training", 60, every_s=0.5)
    assert [cluster.step(d) for d in cluster.runs()] == steps
    assert all(s["state"] == "CANCELLED" for s in cluster.status())
    cluster.write(grid=FOUR, samples=64 * 500)
    assert "4 to start" in cluster.launch("run", "--resubmit")
    cluster.wait_for("DONE")


def test_scancel_by_hand_is_a_cancel_too(cluster):
    cluster.write(how="step_s=0.2", samples=64 * 500)
    cluster.launch("run")
    cluster.wait_for_step(1)
    slurm("scancel", cluster.job())
    cluster.wait_for("CANCELLED")
    assert "0 to start" in cluster.launch("run")


def test_no_accounting_and_a_small_max_array_size(small):
    assert "MaxArraySize            = 4" in slurm("scontrol", "show", "config")
    assert subprocess.run(["sacct"], capture_output=True).returncode != 0
    small.write(grid='model = ["ViT-S-32"]\nimage = ["softmax"]\nseed = [0, 1, 2, 3, 4, 5, 6]')
    out = small.launch("run")
    assert out.count("submitted 3 runs") == 2 and out.count("submitted 1 runs") == 1
    small.wait_for("DONE")
    small.write(how="kill_at=1", samples=640)  # dies without a word to anybody
    small.launch("run")
    dead = [s for s in small.wait_for("FAILED", "DONE") if s["state"] == "FAILED"]
    assert len(dead) == 1 and "SIGKILL" in dead[0]["reason"]
    assert "1 to start" in small.launch("run")
    small.wait_for("DONE")


def test_a_job_that_nobody_knows_is_lost_and_started_again(small):
    small.write()
    small.launch("run")
    small.wait_for("DONE")
    folder = small.run_dir()
    for name in ("done.json", "state.json", "attempts.jsonl"):
        (folder / name).unlink()
    (folder / "submitted.json").write_text(json.dumps({"job": "7", "t": 0.0, "name": "x"}))
    assert small.status()[0]["state"] == "LOST"
    assert "1 to start" in small.launch("run")
    small.wait_for("DONE")


def test_a_launcher_killed_after_sbatch_leaves_nothing_in_doubt(cluster):
    cluster.write(grid=FOUR, how="step_s=0.2")
    shim = cluster.shim("sbatch", f'sbatch "$@"\ntouch {cluster.folder}/sent\nsleep 60')
    command = [sys.executable, "-m", "clip_linear", "launch", "run", str(cluster.toml)]
    env = os.environ | {"PATH": f"{shim}:{os.environ['PATH']}"}
    launcher = subprocess.Popen(command, env=env, start_new_session=True, stdout=subprocess.DEVNULL)
    cluster.until(lambda: (cluster.folder / "sent").exists(), "sbatch", 60)
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
    out = cluster.launch("run")
    assert "adopted job" in out and "0 to start" in out
    done = cluster.wait_for("DONE")
    assert [s["attempts"] for s in done] == [1, 1, 1, 1]
    assert "0 to start" in cluster.launch("run")


def test_a_launcher_killed_before_sbatch_submits_again(cluster):
    cluster.write(grid=FOUR)
    shim = cluster.shim("sbatch", f"touch {cluster.folder}/asked\nsleep 60\nexit 1")
    command = [sys.executable, "-m", "clip_linear", "launch", "run", str(cluster.toml)]
    env = os.environ | {"PATH": f"{shim}:{os.environ['PATH']}"}
    launcher = subprocess.Popen(command, env=env, start_new_session=True, stdout=subprocess.DEVNULL)
    cluster.until(lambda: (cluster.folder / "asked").exists(), "sbatch", 60)
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
    assert "4 to start" in cluster.launch("run")
    assert [s["attempts"] for s in cluster.wait_for("DONE")] == [1, 1, 1, 1]


def test_above_the_submit_limit_it_takes_what_fits(cluster):
    refuse = (
        'n=$(grep -oP "array=\\K0-\\d+" "$1" | cut -d- -f2)\n'
        f"sent=$(cat {cluster.folder}/count 2>/dev/null || echo 0)\n"
        "if [ $((sent + ${n:-0} + 1)) -gt 3 ]; then\n"
        '  echo "sbatch: error: AssocMaxSubmitJobLimit" >&2\n'
        '  echo "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (submit limit)" >&2\n'
        f'  exit 1\nfi\necho $((sent + ${{n:-0}} + 1)) > {cluster.folder}/count\nsbatch "$@"'
    )
    shim = cluster.shim("sbatch", refuse)
    cluster.write(grid=FOUR)
    out = cluster.launch("run", code=1, path=shim)
    assert "submitted 2 runs" in out and "submitted 1 runs" in out and "1 runs wait" in out
    cluster.until(lambda: sum(s["state"] == "DONE" for s in cluster.status()) == 3, "three runs", 90, 0.5)
    assert "submitted 1 runs" in cluster.launch("run")
    cluster.wait_for("DONE")


def test_a_local_queue_inside_a_job_is_local(cluster):
    cluster.write(sweep='profile = "laptop"')
    script = cluster.folder / "outer.sh"
    line = f"srun {sys.executable} -m clip_linear launch run {cluster.toml} --backend local"
    script.write_text(f"#!/bin/bash\n{line} > {cluster.folder}/said 2>&1\n")
    slurm("sbatch", "--wait", "-n1", "-x", "node3,node4", "-o", "/dev/null", str(script))
    assert cluster.status()[0]["state"] == "DONE" and cluster.attempts()[0]["job"] is None


def test_submission_from_inside_a_job(cluster):
    cluster.write(resources="cpus_per_task = 2\nmem_gb = 0.5")
    script = cluster.folder / "outer.sh"
    script.write_text(
        f"#!/bin/bash\n{sys.executable} -m clip_linear launch run {cluster.toml} > {cluster.folder}/said 2>&1\n"
    )
    slurm("sbatch", "--wait", "--mem-per-cpu=100", "-n2", "-x", "node3,node4", "-o", "/dev/null", str(script))
    assert "submitted 1 runs" in (cluster.folder / "said").read_text()
    cluster.wait_for("DONE")


def test_exported_scripts_run_the_same_worker(cluster):
    cluster.write(grid=FOUR, how="step_s=0.05")
    line = next(x for x in cluster.launch("export").splitlines() if x.startswith("sbatch "))
    slurm("sbatch", "--wait", line.split(" ", 1)[1])
    assert [s["state"] for s in cluster.status()] == ["DONE"] * 4
    assert all(a["job"] for d in cluster.runs() for a in cluster.attempts(d))
