"""Killed or told to stop at any moment, also in the middle of a save: the continued run is the uninterrupted one, bit
for bit, on real shards with data workers and several ranks."""

import json
import random
import signal

import pytest

from clip_linear.train import checkpoint
from tests.clip_linear.train_helpers import argv, codes, rows, same_bits, start_ranks_until, weights, write_shards

STEPS = 12
random_moment = random.Random(7)

# (ranks, workers, moments of the attempts before the last, which rank meets them)
SCENARIOS = [
    (1, 0, [("fsync", 6)], 0),  # in the first checkpoint's write
    (1, 0, [("batch", 5, signal.SIGUSR2), ("batch", 4, signal.SIGTERM)], 0),
    (1, 0, [("alarm", random_moment.uniform(0.2, 1.5)), ("alarm", random_moment.uniform(0.2, 1.5))], 0),
    (1, 2, [("half", 2)], 0),
    (1, 2, [("batch", 8, signal.SIGUSR2)], 0),
    (1, 2, [("rename", 9), ("batch", 3, signal.SIGTERM)], 0),
    (2, 0, [("batch", 7, signal.SIGKILL)], 1),
    (2, 0, [("half", 3), ("batch", 2, signal.SIGUSR2)], 0),
    (2, 2, [("batch", 5, signal.SIGTERM)], 1),
    (2, 2, [("alarm", random_moment.uniform(0.5, 2.5))], 0),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Uninterrupted runs by (ranks, workers), made when first asked for."""
    folder = tmp_path_factory.mktemp("whole")
    shards = write_shards(folder / "shards", shards=3, per_shard=20)
    made = {}

    def get(ranks, workers):
        if (ranks, workers) not in made:
            run = folder / f"{ranks}-{workers}"
            made[ranks, workers] = run
            processes = start_ranks_until(ranks, _args(folder, shards, ranks, workers, run), ("none", 0))
            assert codes(processes) == [0] * ranks
        return made[ranks, workers], shards

    return get


def _args(folder, shards, ranks, workers, run):
    flags = {"train-data": shards, "workers": workers, "run-dir": run, "batch-size": 8 // ranks, "save-every-steps": 2}
    extra = ["--force-patch-dropout", "0.25", "--local-loss", "--gather-with-grad"]
    return argv(folder, *extra, **flags, samples=8 * STEPS, model_suffix="+elu+mala")


@pytest.mark.parametrize(
    "ranks, workers, moments, rank",
    [s if i in (0, 3) else pytest.param(*s, marks=pytest.mark.slow) for i, s in enumerate(SCENARIOS)],
)
def test_continued_equals_uninterrupted(tmp_path, whole, ranks, workers, moments, rank):
    reference, shards = whole(ranks, workers)
    args = _args(tmp_path, shards, ranks, workers, tmp_path / "run")
    for moment in moments:
        ended = codes(start_ranks_until(ranks, args, moment, rank))
        kind = moment[-1] if moment[0] == "batch" else None
        stopped = {signal.SIGUSR2: 75, signal.SIGTERM: 143}.get(kind)
        if stopped is not None:
            assert ended == [stopped, *[0] * (ranks - 1)]
        elif moment[0] != "alarm":  # an alarm may come when all is done
            assert ended[rank] == -signal.SIGKILL and not (tmp_path / "run" / "done.json").exists()
    assert codes(start_ranks_until(ranks, args, ("none", 0))) == [0] * ranks
    assert rows(tmp_path / "run") == rows(reference)
    assert same_bits(weights(tmp_path / "run", STEPS), weights(reference, STEPS))
    last = [checkpoint.load(checkpoint.path_of(run, STEPS)) for run in (tmp_path / "run", reference)]
    assert last[0]["data_state"] == last[1]["data_state"]
    assert json.loads((tmp_path / "run" / "done.json").read_text())["samples_seen"] == 8 * STEPS
    assert not list(checkpoint.folder(tmp_path / "run").glob(".*"))


def test_a_second_signal_ends_at_once(tmp_path, whole):
    _, shards = whole(1, 0)
    args = _args(tmp_path, shards, 1, 0, tmp_path / "run")
    assert codes(start_ranks_until(1, args, ("batch twice", 4, signal.SIGTERM))) == [143]
    assert set(checkpoint.steps_on_disk(tmp_path / "run")) <= {2}  # one signal would have saved step 4


@pytest.mark.slow
def test_another_number_of_ranks_continues_with_a_warning(tmp_path, whole):
    _, shards = whole(1, 0)
    two = _args(tmp_path, shards, 2, 0, tmp_path / "run")
    assert codes(start_ranks_until(2, two, ("batch", 5, signal.SIGUSR2))) == [75, 0]
    with open(tmp_path / "err", "w") as err:
        one = _args(tmp_path, shards, 1, 2, tmp_path / "run")
        assert codes(start_ranks_until(1, one, ("none", 0), stderr=err.name)) == [0]
    said = (tmp_path / "err").read_text()
    assert "2 ranks with 0 workers each; now there are 1 with 2" in said
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, STEPS + 1))
