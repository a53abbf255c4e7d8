"""The local queue and the worker: finished work is skipped, interrupted work continues, nothing loops or hides."""

import json
import os
import signal
import subprocess
import sys

import pytest

TWO = 'model = ["ViT-S-32"]\nimage = ["softmax", "mala"]'
TOTAL = sum(1.0 / (i + 1) for i in range(20))  # what 20 uninterrupted steps add up to, in this order


def test_run_twice_is_a_no_op(bench):
    bench.write(grid=TWO)
    assert "2 NEW; 2 to start" in bench.launch("run")
    before = {p: p.read_bytes() for d in bench.runs() for p in d.glob("*.json*")}
    assert "2 DONE; 0 to start" in bench.launch("run")
    assert before == {p: p.read_bytes() for d in bench.runs() for p in d.glob("*.json*")}
    assert [(s["state"], s["step"], s["attempts"]) for s in bench.status()] == [("DONE", 5, 1)] * 2
    assert "2 DONE; 0 to start" in bench.launch("run", "--retry-failed", "--resubmit")


def test_dry_run_starts_and_writes_nothing(bench):
    bench.write()
    assert "start  NEW" in bench.launch("run", "--dry-run")
    assert not bench.sweep.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stopped_or_killed_queue_continues_without_losing_or_repeating_a_step(bench, number):
    bench.write(how="hold_at=3,save_every=1", samples=64 * 20)
    queue = bench.start("run")
    bench.hold(3)
    os.kill(queue.pid, number)
    queue.wait(60)
    if number == signal.SIGKILL:  # the worker outlives the queue; a second queue leaves the run alone
        assert bench.status()[0]["state"] == "RUNNING"
        assert "1 RUNNING; 0 to start" in bench.launch("run")
        bench.release()
        bench.until(lambda: bench.status()[0]["state"] == "DONE", "the end")
    else:
        assert queue.returncode == 130 and bench.status()[0]["state"] == "INTERRUPTED"
        bench.release()
        bench.launch("run")
        assert [a["class"] for a in bench.attempts()] == ["stopped", "done"]
        assert bench.attempts()[1]["start_step"] == bench.attempts()[0]["end_step"] == 3
    done = json.loads((bench.run_dir() / "done.json").read_text())
    assert done["total"] == TOTAL and done["step"] == 20


def test_a_killed_worker_takes_its_trainer_along_and_the_run_continues(bench):
    bench.write(how="hold_at=3,save_every=1", samples=64 * 20)
    queue = bench.start("run")
    bench.hold(3)
    pid = int((bench.run_dir() / ".lock").read_text().split()[1])
    os.kill(pid, signal.SIGKILL)
    bench.until(lambda: len(bench.attempts()) == 2, "the second attempt")
    bench.release()
    queue.communicate(timeout=120)
    assert queue.returncode == 0
    assert [a["class"] for a in bench.attempts()] == ["infrastructure", "done"]
    assert json.loads((bench.run_dir() / "done.json").read_text())["total"] == TOTAL


def test_a_time_limit_is_a_requeue(bench):
    bench.write(
        how="step_s=0.25,save_every=100",
        samples=64 * 20,
        more='[resources]\ntime = "0:3"\n[limits]\nsignal_delay_s = 1',
    )
    out = bench.launch("run")
    assert "time limit" in out
    assert [a["class"] for a in bench.attempts()][:-1] == ["timeout"] * (len(bench.attempts()) - 1)
    assert json.loads((bench.run_dir() / "done.json").read_text())["total"] == TOTAL


def test_no_progress_is_a_failure_not_a_loop(bench):
    bench.write(how="stuck=1,step_s=0.02", more='[resources]\ntime = "0:2"\n[limits]\nsignal_delay_s = 1')
    assert "no progress: 2 time-outs in a row" in bench.launch("run", code=1)
    assert [s["state"] for s in bench.status()] == ["FAILED"]
    assert "0 to start" in bench.launch("run")


def test_a_deaf_trainer_is_killed_at_its_limit(bench):
    bench.write(
        how="deaf=1,step_s=0.02,stuck=1",
        more='[resources]\ntime = "0:2"\n[limits]\nsignal_delay_s = 1\nmax_retries = 0',
    )
    assert "no progress" in bench.launch("run", code=1)  # USR2, then TERM: the second signal ends it at once
    assert {a["class"] for a in bench.attempts()} == {"timeout", "error"}
    assert "before it had saved" in bench.attempts()[0]["reason"]


def test_python_errors_are_not_retried_without_asking(bench):
    bench.write(how="fail_at=2,save_every=1")
    assert "ZeroDivisionError: planned" in bench.launch("run", code=1)
    status = bench.status()[0]
    assert (status["state"], status["attempts"]) == ("FAILED", 1) and "ZeroDivisionError" in status["reason"]
    assert "0 to start" in bench.launch("run")
    bench.launch("retry")  # the stand-in fails only in its first life
    assert [a["class"] for a in bench.attempts()] == ["error", "done"]


def test_infrastructure_failures_are_retried_up_to_the_limit(bench):
    bench.write(how="kill_at=2,save_every=1")
    assert "retry" in bench.launch("run")
    assert [a["class"] for a in bench.attempts()] == ["infrastructure", "done"]
    assert "SIGKILL" in bench.attempts()[0]["reason"]


def test_the_network_is_not_the_runs_fault_but_not_for_ever(bench):
    bench.write(how="net_at=0", more="[limits]\nmax_retries = 2")
    bench.launch("run", code=1)
    assert [a["class"] for a in bench.attempts()] == ["infrastructure"] * 3
    assert "0 to start" in bench.launch("run")


def test_cancelled_stays_cancelled(bench):
    bench.write(grid=TWO, how="hold_at=1")
    queue = bench.start("run")
    bench.hold(1)
    assert "2 runs cancelled" in bench.launch("cancel")
    queue.communicate(timeout=120)
    assert [s["state"] for s in bench.status()] == ["CANCELLED"] * 2
    assert "0 to start" in bench.launch("run") and "0 to start" in bench.launch("retry")
    assert bench.launch("run", "--resubmit", "--dry-run").count("start  CANCELLED") == 2


def test_cancel_one_and_resubmit(bench):
    bench.write(grid=TWO)
    bench.write(grid=TWO, how="fail_at=0")
    bench.launch("run", code=1)
    assert "1 runs cancelled" in bench.launch("cancel", "mala")
    assert sorted(s["state"] for s in bench.status()) == ["CANCELLED", "FAILED"]
    assert "1 to start" in bench.launch("run", "--resubmit")
    assert "unknown run" in bench.launch("cancel", "nothing", code=2)


def test_several_at_a_time_and_only_one_queue(bench):
    bench.write(grid='model = ["ViT-S-32"]\nimage = ["softmax", "mala", "elu"]', how="hold_at=1")
    queue = bench.start("run", "--max-parallel", "2")
    bench.hold(1, runs=2)
    assert "already works on this sweep" in bench.launch("run", code=2)
    bench.release()
    queue.communicate(timeout=120)
    assert queue.returncode == 0
    spans = [(a["start"], a["end"]) for d in bench.runs() for a in bench.attempts(d)]
    assert max(sum(s <= start < e for s, e in spans) for start, _ in spans) == 2


def test_detached_queue(bench):
    bench.write()
    assert "runs in the background" in bench.launch("run", "--detach")
    log = bench.sweep / "queue.log"
    bench.until(lambda: "[1/1] done" in log.read_text(), "the detached run")
    assert bench.status()[0]["state"] == "DONE"


def test_local_ranks(bench):
    bench.write(more="[resources]\ntasks_per_node = 2")
    bench.launch("run")
    logs = [(bench.run_dir() / "log" / f"rank-{i}.log").read_text() for i in range(2)]
    assert "rank 0/2" in logs[0] and "rank 1/2" in logs[1]
    ports = {int(log.split("on port ")[1].split()[0]) for log in logs}
    assert len(ports) == 1 and ports.pop() < 32768


@pytest.mark.slow
def test_a_dead_rank_ends_the_others(bench):
    more = "[resources]\ntasks_per_node = 2\n[limits]\nmax_retries = 0"
    bench.write(how="kill_at=1,rank=1,step_s=0.1", samples=128 * 600, more=more)
    bench.launch("run", code=1)
    assert "SIGKILL" in bench.status()[0]["reason"]


def test_logs_and_collect(bench):
    bench.write(grid=TWO)
    bench.launch("run")
    assert "starts at step 0" in bench.launch("logs", "mala")
    assert "fits 2 runs" in bench.launch("logs", "ViT", code=2)
    rows = json.loads(bench.launch("collect", "--json"))
    assert {r["metric"] for r in rows} == {"acc1", "loss"} and {r["study"] for r in rows} == {"mini"}
    assert all(r["n_params_vision"] and r["gmacs_total"] and r["arch"] == "ViT-S-32" for r in rows)
    assert (bench.sweep / "rows.csv").read_text().startswith("study,run_id,model")


def test_report_is_one_command(bench):
    bench.write(grid='model = ["ViT-S-32", "ViT-B-32", "ViT-B-16"]\nimage = ["softmax", "mala"]')
    bench.launch("run", "--max-parallel", "2")
    out = bench.launch("report", "--metric", "acc1", "--x", "gmacs_total")
    assert str(bench.sweep / "report.html") in out
    assert (bench.sweep / "report.md").exists() and "mala" in (bench.sweep / "report.html").read_text()
    assert "no finished run" in bench.launch("report", "--metric", "nothing", code=2)


def test_the_best_of_a_tuned_cell_counts(bench):
    bench.write(more='[per_model."ViT-S-32"]\nlr = [1e-3, 2e-3]')
    bench.launch("run")
    worse = next(d for d in bench.runs() if "0.001" in json.loads((d / "run.json").read_text())["argv"])
    (worse / "metrics.jsonl").write_text('{"step": 1, "loss": 99.0}\n')
    rows = json.loads(bench.launch("collect", "--json"))
    assert {json.loads(r["tuning"])["lr"] for r in rows} == {2e-3}
    assert len((bench.sweep / "rows_all.csv").read_text().splitlines()) == 5


def test_clean_keeps_what_counts(bench):
    bench.write()
    bench.launch("run")
    assert "would remove" in bench.launch("clean", "--checkpoints", "--dry-run")
    bench.launch("clean", "--checkpoints")
    assert not (bench.run_dir() / "checkpoints").exists()
    assert "0 to start" in bench.launch("run")


def test_bad_input_is_one_line(bench):
    for args, says in ((["--max-parallel", "0"], "at least 1"), (["--root", "/dev/null/x"], "/dev/null")):
        bench.write()
        out = bench.launch("run", *args, code=2)
        assert says in out and len(out.strip().splitlines()) == 1
    bench.write(more="[resources]\nnodes = 2")
    assert "local queue has one" in bench.launch("run", code=2)
    bench.write(more='[resources]\ntime = "0:30"\n[limits]\nsignal_delay_s = 30')
    assert "told to stop at once" in bench.launch("run", code=2)
    bench.toml.unlink()
    assert "does not exist" in bench.launch("status", code=2)


def test_a_command_that_is_not_there_is_an_error_of_the_run(bench):
    bench.write()
    bench.toml.write_text(bench.toml.read_text().replace('"python", ', '"/no/such/program", '))
    assert "cannot start /no/such/program" in bench.launch("run", code=1)
    assert bench.status()[0]["state"] == "FAILED"


def test_help_is_fast_and_light():
    code = (
        "import sys, contextlib, io\nfrom clip_linear_launch import cli\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): cli.main(['run', '--help'])\n"
        "print([m for m in ('torch', 'open_clip', 'submitit', 'pandas', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stdout + out.stderr
