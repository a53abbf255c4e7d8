"""What Slurm says, and what an attempt's end means: the cases that a live cluster shows too rarely."""

import datetime
import json
import signal

import pytest

from clip_linear_launch import failures, preflight, ranks, requeue, rundir, scheduler, status


@pytest.fixture
def clients(tmp_path, monkeypatch):
    """Slurm clients that answer what a test says."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def answer(name, text="", code=0, sleep=0):
        path = folder / name
        path.write_text(f"#!/bin/sh\nsleep {sleep}\ncat <<'END'\n{text}\nEND\nexit {code}\n")
        path.chmod(0o755)

    return answer


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "sweep" / "runs" / "r1"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"run_id": "r1", "steps": 10, "limits": {}, "resources": {}}))
    (folder / "submitted.json").write_text(json.dumps({"job": "5_1", "t": 1.0, "name": "clip"}))
    return folder


def state(run):
    ((seen, kind),) = status.look([run])
    return seen.state, kind


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("5_1|PENDING|Priority||clip", "PENDING"),
        ("5_1|RUNNING|None|node1|clip", "RUNNING"),
        ("5_1|CONFIGURING|None||clip", "PENDING"),
        ("5_1|SUSPENDED|None|node1|clip", "RUNNING"),
        ("5_1|CANCELLED|None||clip", "CANCELLED"),
        ("5_1|NODE_FAIL|None||clip", "INTERRUPTED"),
        ("5_1|TIMEOUT|None||clip", "INTERRUPTED"),
        ("5_1|OUT_OF_MEMORY|None||clip", "INTERRUPTED"),
        ("5_2|RUNNING|None|node1|clip", "LOST"),
    ],
)
def test_squeue_decides(clients, run, line, expected):
    clients("squeue", line)
    assert state(run)[0] == expected


@pytest.mark.parametrize("word", ["NODE_FAIL", "PREEMPTED"])
def test_a_job_that_failed_this_minute_may_be_requeued_in_the_next(clients, run, word):
    now = datetime.datetime.now().replace(microsecond=0)
    clients("squeue", f"5_1|{word}|None|node1|clip|{now.isoformat()}")
    assert state(run)[0] == "PENDING"
    clients("squeue", f"5_1|{word}|None|node1|clip|{(now - datetime.timedelta(minutes=5)).isoformat()}")
    assert state(run)[0] == "INTERRUPTED"


def test_sacct_is_asked_for_what_squeue_has_forgotten_and_its_last_row_counts(clients, run):
    clients("squeue", "")
    clients("sacct", "5_1|PREEMPTED|node1|clip|0:0\n5_1|CANCELLED by 0|node2|clip|0:0")
    assert state(run)[0] == "CANCELLED"
    clients("sacct", "5_[0-3%2]|PENDING|None assigned|clip|0:0")
    assert scheduler.accounted(["5_1"])["5_3"].state == "PENDING"
    clients("squeue", "", code=1)
    assert state(run)[0] == "PENDING"


def test_a_requeued_job_is_not_what_its_last_attempt_was(clients, run):
    rundir.record_attempt(run, attempt=1, start=1.0, job="5_1")
    rundir.record_attempt(run, attempt=1, end=2.0, **{"class": "timeout", "reason": "time limit"})
    clients("squeue", "5_1|PENDING|BeginTime||clip")
    assert state(run)[0] == "REQUEUED"


def test_when_slurm_is_silent_nothing_is_lost(clients, run):
    clients("squeue", "", code=1)
    clients("sacct", "", code=1)
    assert state(run)[0] == "STALE"
    (run / "done.json").write_text("{}")
    assert state(run)[0] == "DONE"


def test_a_client_that_hangs_is_given_up(clients, monkeypatch):
    clients("squeue", sleep=30)
    monkeypatch.setattr(scheduler, "TIMEOUT_S", 0.2)
    assert scheduler.queued(["1"]) is None


def test_an_old_heartbeat_is_stale(clients, run):
    clients("squeue", "5_1|RUNNING|None|node1|clip")
    rundir.record_attempt(run, attempt=1, start=1.0, job="5_1")
    assert state(run)[0] == "STALE"


@pytest.mark.parametrize(
    ("code", "asked", "log", "kind", "exit_code"),
    [
        (75, None, "", "timeout", 75),
        (-signal.SIGUSR2, signal.SIGUSR2, "", "timeout", 75),
        (143, signal.SIGTERM, "", "stopped", 143),
        (143, signal.SIGUSR2, "", "timeout", 143),
        (-signal.SIGKILL, signal.SIGTERM, "", "stopped", 143),
        (-signal.SIGKILL, None, "", "infrastructure", 137),
        (-signal.SIGBUS, None, "", "infrastructure", 135),
        (-signal.SIGSEGV, None, "", "error", 139),
        (1, None, "ValueError: no", "error", 1),
        (2, None, "clip-linear train: no such file", "error", 1),
        (1, None, "RuntimeError: NCCL error in: x", "infrastructure", 1),
        (1, None, "OSError: [Errno 98] Address already in use", "infrastructure", 1),
        (0, None, "", "error", 1),
    ],
)
def test_verdicts(run, code, asked, log, kind, exit_code):
    (run / "log").mkdir()
    (run / "log" / "rank-0.log").write_text(
        f"\n{failures.ATTEMPT_MARK}old\nNCCL error\n{failures.ATTEMPT_MARK}new\n{log}\n"
    )
    verdict = failures.judge(run, code, asked, 0)
    assert (verdict.kind, verdict.exit) == (kind, exit_code)
    assert verdict.reason


def test_the_worst_of_several_ranks_speaks():
    assert failures.worst([0, -9, 1]) == 1 and failures.worst([0, -9]) == -9
    assert failures.worst([75, 0, 0]) == 75 and failures.worst([143, 0]) == 143 and failures.worst([0, 0]) == 0


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node[01-04,7]", "node01"), ("a,b", "a"), ("gpu-3", "gpu-3"), ("n[7]", "n7"), ("c1n[2,5]", "c1n2")],
)
def test_first_node(nodes, first):
    assert ranks.first_node(nodes) == first


def test_ports_stay_below_the_ephemeral_range():
    assert {20000 <= ranks.port(str(i)) < 32768 for i in range(500)} == {True}
    assert len({ranks.port(str(i)) for i in range(100)}) > 90


def test_requeue_answers(clients):
    assert requeue.requeue(None) is False
    clients("scontrol")
    assert requeue.requeue("1_2") is True
    clients("scontrol", code=127)
    assert requeue.requeue("1") is False
    clients("scontrol", code=1)
    assert requeue.requeue("1") is False


def test_a_requeue_that_was_terminated_or_is_pending_already_counts(clients, tmp_path):
    path = tmp_path / "bin" / "scontrol"
    path.write_text("#!/bin/sh\nkill -9 $$\n")
    path.chmod(0o755)
    assert requeue.requeue("1") is True
    path.write_text("#!/bin/sh\necho 'slurm_requeue error: Job is pending execution' >&2\nexit 1\n")
    assert requeue.requeue("1") is True


def test_retries_start_again_after_progress():
    bad = {"class": "infrastructure", "start_step": 0, "end_step": 0}
    good = {"class": "stopped", "start_step": 0, "end_step": 9}
    assert rundir.faults_in_a_row([bad, bad]) == 2
    assert rundir.faults_in_a_row([bad, bad, good, bad]) == 1
    assert rundir.faults_in_a_row([bad | {"class": "error"}]) == 0


def test_too_little_shared_memory_is_said_before_it_kills_the_data_workers(tmp_path):
    run = {"argv": ["python", "--workers", "4", "--batch-size", "64"], "image_size": 224}
    free = preflight.os.statvfs(tmp_path).f_bavail * preflight.os.statvfs(tmp_path).f_frsize
    assert preflight.shared_memory(run, 1, str(tmp_path)) is None or free < 4 * 2 * 64 * 3 * 224**2 * 4
    many = 2 + free // (4 * 2 * 64 * 3 * 224**2 * 4)
    assert "unable to allocate shared memory" in preflight.shared_memory(run, many, str(tmp_path))
    assert preflight.shared_memory(run | {"argv": ["python", "--workers", "0"]}, many, str(tmp_path)) is None
    assert preflight.shared_memory(run, many, "/nowhere") is None
