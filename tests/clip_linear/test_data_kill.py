"""A training process that is killed at random steps, again and again, ends with the numbers of one that was not."""

import json
import os
import random
import signal
import time

import pytest

from tests.clip_linear.train_helpers import argv, codes, rows, same_bits, start, start_ranks, weights, write_shards

STEPS = 24


def options(folder, run_dir, data, workers):
    return argv(
        folder,
        *("--filter", "image_width>10"),
        run_dir=run_dir,
        train_data=data,
        samples=8 * STEPS,
        workers=workers,
        save_every_steps=3,
        keep_last=100,
        shuffle_buffer_mib=0.01,
        max_fault_rate=1,
    )


def damage(folder):
    """Give the shards faults of several kinds, so that their counts are part of the comparison."""
    shard = folder / "00001.tar"
    content = bytearray(shard.read_bytes())
    content[content.index(b"001000003.jpg") + 110] ^= 0xFF
    content[content.index(b"001000007.jpg") + 700 : content.index(b"001000007.jpg") + 720] = bytes(20)
    shard.write_bytes(content)
    (folder / "00002.tar").write_bytes((folder / "00002.tar").read_bytes()[:-12000])


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "kills"), [(0, 5), (2, 5), (4, 2)])
def test_killed_it_is_the_same_run(tmp_path, workers, kills):
    data = write_shards(tmp_path / "data", shards=5, per_shard=23)
    damage(tmp_path / "data")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert codes([start(options(tmp_path, whole, data, workers), None)]) == [0]
    rng, metrics = random.Random(workers), killed / "metrics.jsonl"
    for at in sorted(rng.sample(range(2, STEPS - 2), kills)):
        process = start(options(tmp_path, killed, data, workers), None)
        deadline = time.monotonic() + 120
        while process.exitcode is None and time.monotonic() < deadline:
            if metrics.exists() and metrics.read_text().count("\n") >= at:
                break
            process.join(0.005)
        os.kill(process.pid, signal.SIGKILL)
        assert codes([process]) == [-signal.SIGKILL]
    assert codes([start(options(tmp_path, killed, data, workers), None)]) == [0]
    assert rows(killed) == rows(whole)
    assert [r["step"] for r in rows(whole)] == list(range(1, STEPS + 1))
    assert rows(whole)[-1]["faults"].keys() == {"corrupt_shard", "image_decode_error", "truncated_shard"}
    assert same_bits(weights(killed, STEPS), weights(whole, STEPS))
    lines = [sorted((run / "data_faults.jsonl").read_text().splitlines()) for run in (killed, whole)]
    assert lines[0] == lines[1]


@pytest.mark.slow
def test_the_faults_of_all_ranks_are_told(tmp_path):
    data = write_shards(tmp_path / "data", shards=4, per_shard=24)
    for shard in ("00001.tar", "00002.tar"):
        (tmp_path / "data" / shard).write_bytes(b"")
    args = argv(tmp_path, run_dir=tmp_path / "run", train_data=data, samples=96, batch_size=8)
    assert codes(start_ranks(2, args, None)) == [0, 0]
    told = rows(tmp_path / "run")[-1]["faults"]
    written = (tmp_path / "run" / "data_faults.jsonl").read_text().splitlines()
    assert told == {"empty_shard": len(written)} and len(written) >= 2
    assert json.loads((tmp_path / "run" / "done.json").read_text())["faults"] == told
