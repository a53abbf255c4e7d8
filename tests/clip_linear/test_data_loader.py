"""The training loader: order, budget, exact resume, another layout, faults, and never hanging."""

import hashlib
import io
import json
import logging
import os
import random
import signal
import tarfile
import time
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from clip_linear.data import DataConfig, merge_states, train_loader
from clip_linear.errors import RunError, UserError

PREPROCESS = transforms.Compose(
    [
        transforms.RandomResizedCrop(16, scale=(0.5, 1.0), interpolation=transforms.InterpolationMode.BICUBIC),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)),
    ]
)


def tokenize(texts):
    return torch.tensor([[int(t.split()[1])] for t in texts])


def write(folder, sizes, bad=(), extension="txt"):
    """Shards with that many samples; captions count on through all of them; ``bad`` numbers have no readable image."""
    folder.mkdir(exist_ok=True)
    rng, number = np.random.default_rng(0), 0
    for shard, size in enumerate(sizes):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for _ in range(size):
                buffer = io.BytesIO()
                Image.fromarray(rng.integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(buffer, "JPEG")
                image = b"broken" if number in bad else buffer.getvalue()
                for name, content in (("jpg", image), (extension, f"n {number}".encode())):
                    info = tarfile.TarInfo(f"{number:06d}.{name}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
                number += 1
    return str(folder)


def loader(data, batches=30, batch_size=8, *, world_size=1, rank=0, state=None, step=0, faults_path=None, **options):
    options = {"shuffle_buffer_mib": 0.02, "timeout_s": 60, **options}
    config = DataConfig(
        train_data=data, batch_size=batch_size, num_samples=batches * batch_size * world_size, **options
    )
    return train_loader(
        config, PREPROCESS, tokenize, rank=rank, world_size=world_size, state=state, step=step, faults_path=faults_path
    )


def run(data, stop=None, **options):
    """Batches as (numbers, digest of the pixels), and the state after the last."""
    found, state = [], None
    one = loader(data, **options)
    for batch in one:
        digest = hashlib.sha1(batch.images.numpy().tobytes()).hexdigest()
        found.append((tuple(batch.texts[:, 0].tolist()), digest))
        state = batch.state
        if stop is not None and options.get("step", 0) + len(found) == stop:
            break
    one.close()
    return found, state


def shown(batches):
    return [n for numbers, _ in batches for n in numbers]


@pytest.mark.parametrize("workers", [0, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sizes", [(20, 21, 22, 9, 8), (40,)], ids=["several", "one"])
@pytest.mark.parametrize("resampled", [False, True])
def test_resume_is_bit_exact_at_any_step(tmp_path, workers, sizes, resampled):
    data = write(tmp_path / "d", sizes, bad={3, 30})
    options = {"workers": workers, "dataset_resampled": resampled, "batches": 19}
    whole, _ = run(data, **options)
    assert len(whole) == 19
    for stop in (5,) if workers == 2 else (1, 6, 13):
        first, state = run(data, stop=stop, **options)
        rest, _ = run(data, state=state, step=stop, **options)
        assert first + rest == whole


@pytest.mark.slow
def test_started_by_spawn_it_gives_the_same(tmp_path):
    data = write(tmp_path / "d", (20, 21))
    assert run(data, workers=2, batches=6, start_method="spawn") == run(data, workers=2, batches=6)


def test_seed_decides_the_order_alone(tmp_path):
    data = write(tmp_path / "d", (20, 21, 22))
    first, again, other = (run(data, seed=seed)[0] for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("workers", [0, 2])
def test_each_pass_shows_every_sample_once(tmp_path, workers):
    data = write(tmp_path / "d", (16, 16, 16, 16))
    numbers = shown(run(data, batches=24, workers=workers)[0])
    assert Counter(numbers) == {n: 3 for n in range(64)}
    assert numbers[:64] != sorted(numbers[:64])


@pytest.mark.parametrize(("sizes", "streams"), [((64,), 4), ((32, 32), 4), ((16,) * 6, 4), ((8,) * 10, 4)])
def test_streams_share_shards_evenly(tmp_path, sizes, streams):
    data = write(tmp_path / "d", sizes)
    total = sum(sizes)
    numbers = []
    for rank in range(streams):
        numbers += shown(run(data, batches=total // streams // 4, batch_size=4, rank=rank, world_size=streams)[0])
    assert len(numbers) == total and len(set(numbers)) == total


def test_budget_is_exact_to_one_global_batch(tmp_path):
    data = write(tmp_path / "d", (20, 7))
    config = DataConfig(train_data=data, batch_size=8, num_samples=100, workers=0)
    lengths = [len(train_loader(config, PREPROCESS, tokenize, rank=r, world_size=2)) for r in range(2)]
    assert lengths == [7, 7]
    batches = list(train_loader(config, PREPROCESS, tokenize, rank=1, world_size=2))
    assert [b.samples for b in batches] == [8] * 7 and batches[0].images.shape == (8, 3, 16, 16)
    assert batches[0].images.dtype == torch.float32 and batches[0].texts.dtype == torch.int64


@pytest.mark.parametrize(("before", "after"), [((1, 2), (1, 3)), ((2, 0), (1, 0)), ((1, 0), (3, 0)), ((2, 2), (1, 2))])
@pytest.mark.parametrize("sizes", [(32,) * 6, (96, 96)], ids=["many", "few"])
def test_another_layout_shows_the_rest_of_the_pass_once(tmp_path, before, after, sizes, caplog):
    data = write(tmp_path / "d", sizes)
    numbers, states = [], []
    for rank in range(before[0]):
        done, state = run(data, stop=6, rank=rank, world_size=before[0], workers=before[1])
        numbers += shown(done)
        states.append(state)
    merged = json.loads(json.dumps(merge_states(states)))
    for rank in range(after[0]):
        one = loader(data, 400, 1, state=merged, rank=rank, world_size=after[0], workers=after[1])
        ended = set()
        for number, batch in enumerate(one):
            stream = one.mine[number % len(one.mine)]
            if batch.state["streams"][stream]["pass"] == 0:
                numbers.append(int(batch.texts))
            else:
                ended.add(stream)
            if len(ended) == len(one.mine):
                break
        assert len(ended) == len(one.mine)
    assert any("order changes" in r.message for r in caplog.records)
    assert len(numbers) == 192 and set(numbers) == set(range(192))


def test_state_survives_a_weights_only_checkpoint(tmp_path):
    data = write(tmp_path / "d", (20, 21))
    whole, _ = run(data)
    first, state = run(data, stop=5)
    torch.save({"data_state": state}, tmp_path / "c.pt")
    state = torch.load(tmp_path / "c.pt", weights_only=True)["data_state"]
    assert first + run(data, state=state, step=5)[0] == whole


def test_changed_shards_begin_anew_with_a_warning(tmp_path, caplog):
    state = run(write(tmp_path / "d", (20, 21)), stop=5)[1]
    other = write(tmp_path / "e", (20, 21, 5))
    with caplog.at_level(logging.WARNING):
        assert len(run(other, state=state, step=5)[0]) == 25
    assert any("not those of the checkpoint" in r.message for r in caplog.records)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_generators_of_the_process_are_left_alone(tmp_path, workers):
    data = write(tmp_path / "d", (20, 21))
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = torch.rand(2), random.random(), np.random.rand()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    run(data, workers=workers, batches=4)
    drawn = torch.rand(2), random.random(), np.random.rand()
    assert torch.equal(expected[0], drawn[0]) and expected[1:] == drawn[1:]


def test_a_batch_equals_the_transform_applied_one_by_one(tmp_path):
    """The last two steps run once for the whole batch; not one bit may differ for that."""
    data = write(tmp_path / "d", (20,))
    plain = transforms.Compose([transforms.Compose(PREPROCESS.transforms)])  # not taken apart
    config = DataConfig(train_data=data, batch_size=8, num_samples=32)
    for one, other in zip(train_loader(config, PREPROCESS, tokenize), train_loader(config, plain, tokenize)):
        assert torch.equal(one.images, other.images) and torch.equal(one.texts, other.texts)


def test_fewer_samples_than_a_batch_warns_and_works(tmp_path, caplog):
    data = write(tmp_path / "d", (5,))
    with caplog.at_level(logging.WARNING):
        batches, _ = run(data, batches=4)
    assert set(shown(batches)) == set(range(5)) and len(batches) == 4
    assert any("more than once" in r.message for r in caplog.records)


def test_a_batch_over_the_end_of_a_pass_holds_no_sample_twice(tmp_path):
    data = write(tmp_path / "d", (13,))
    for numbers, _ in run(data, batches=40)[0]:
        assert len(set(numbers)) == 8


def test_weights_and_resampling(tmp_path):
    a, b = write(tmp_path / "a", (8,) * 4), write(tmp_path / "b", (8,) * 4)
    one = loader(f"{a}::{b}", batches=150, dataset_resampled=True, upsampling_factors="1::3")
    for _ in one:
        pass
    assert sum(one.delivered.values()) == 1200 and 2.3 < one.delivered["1"] / one.delivered["0"] < 3.9
    with pytest.raises(UserError, match="dataset-resampled"):
        loader(a, upsampling_factors="1")
    with pytest.raises(UserError, match="2 sources"):
        loader(f"{a}::{b}", dataset_resampled=True, upsampling_factors="1")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("resampled", [False, True])
def test_no_captions_end_at_once_with_the_cause(tmp_path, workers, resampled):
    data = write(tmp_path / "d", (20, 20), extension="cls")
    start = time.monotonic()
    with pytest.raises(RunError, match=r"missing_caption ×.*no member holds a caption.*\.cls ×"):
        run(data, workers=workers, dataset_resampled=resampled)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("resampled", [False, True])
def test_missing_unreadable_or_filtered_data_end_at_once(tmp_path, workers, resampled):
    options = {"workers": workers, "dataset_resampled": resampled}
    with pytest.raises(RunError, match="missing_shard"):
        run(str(tmp_path / "{0..3}.tar"), **options)
    data = write(tmp_path / "d", (10, 10), bad=range(20))
    with pytest.raises(RunError, match="image_decode_error"):
        run(data, **options)
    data = write(tmp_path / "e", (10, 10))
    with pytest.raises(RunError, match="filtered_image_width"):
        run(data, filters=("image_width<5",), **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_shards_beside_a_good_one_do_not_end_the_run(tmp_path, workers):
    data = write(tmp_path / "d", (20,))
    (tmp_path / "d" / "00001.tar").write_bytes(b"")
    (tmp_path / "d" / "00002.tar").write_bytes(b"<html>" * 300)
    batches, state = run(f"{data}/0000{{0..3}}.tar", workers=workers, batches=10)
    assert set(shown(batches)) == set(range(20))
    assert state["faults"]["0"]["counts"] == {"empty_shard": 1, "corrupt_shard": 1, "missing_shard": 1}


def rows(path):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(set(row) == {"reason", "shard", "key", "offset", "detail", "rank"} for row in found)
    return sorted((r["reason"], r["shard"], str(r["key"]), r["offset"], r["rank"]) for r in found)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("passes", [1, 3])
def test_each_fault_is_counted_and_written_once(tmp_path, workers, passes):
    data = write(tmp_path / "d", (20, 21, 22, 21), bad={3, 30, 31, 70})
    (tmp_path / "d" / "00009.tar").write_bytes(b"")
    one = loader(data, batches=passes * 10, workers=workers, faults_path=tmp_path / "f.jsonl")
    assert len(list(one)) == passes * 10  # 80 good samples
    assert one.faults == {"empty_shard": 1, "image_decode_error": 4}
    found = rows(tmp_path / "f.jsonl")
    assert [r[0] for r in found] == ["empty_shard"] + 4 * ["image_decode_error"]
    assert [r[2] for r in found[1:]] == ["000003", "000030", "000031", "000070"]


@pytest.mark.parametrize("workers", [0, 2])
def test_fault_rows_and_counts_are_those_of_an_uninterrupted_run(tmp_path, workers):
    data = write(tmp_path / "d", (20, 21, 22, 17), bad={3, 30, 31, 70})
    (tmp_path / "d" / "00009.tar").write_bytes(b"")
    options = {"workers": workers, "batches": 9}
    whole = loader(data, faults_path=tmp_path / "whole.jsonl", **options)
    assert len(list(whole)) == 9 and len(rows(tmp_path / "whole.jsonl")) == sum(whole.faults.values())
    state = run(data, stop=4, faults_path=tmp_path / "cut.jsonl", **options)[1]
    # The first process went on after the checkpoint: it wrote rows that the second one will write again.
    run(data, stop=7, faults_path=tmp_path / "cut.jsonl", state=state, step=4, **options)
    second = loader(data, faults_path=tmp_path / "cut.jsonl", state=state, step=4, **options)
    assert len(list(second)) == 5
    assert second.faults == whole.faults and rows(tmp_path / "cut.jsonl") == rows(tmp_path / "whole.jsonl")


def test_ranks_share_the_file_and_hand_on_their_counts(tmp_path):
    data, path = write(tmp_path / "d", (16,) * 4, bad={3, 20, 40, 60}), tmp_path / "f.jsonl"
    states = [run(data, stop=3, rank=r, world_size=2, batches=4, faults_path=path)[1] for r in range(2)]
    before = sum((Counter(s["faults"][str(r)]["counts"]) for r, s in enumerate(states)), Counter())
    assert len(rows(path)) == sum(before.values()) > 0
    for r in range(2):  # rows that are written after the checkpoint
        run(data, rank=r, world_size=2, batches=8, state=merge_states(states), step=3, faults_path=path)
    one = loader(data, batches=12, state=merge_states(states), step=6, faults_path=path)
    assert one.faults == before and len(rows(path)) == sum(before.values())
    assert len(list(one)) == 6 and sum(one.faults.values()) == len(rows(path))


def test_too_many_bad_samples_end_the_run_with_a_table(tmp_path):
    data = write(tmp_path / "d", (100, 100), bad=set(range(0, 200, 5)))
    with pytest.raises(RunError, match=r"max-fault-rate 0.05(.|\n)*image_decode_error"):
        run(data, batches=40)
    assert len(run(data, batches=40, max_fault_rate=0.3)[0]) == 40


def test_one_console_line_per_kind(tmp_path, caplog):
    data = write(tmp_path / "d", (100,), bad=set(range(0, 100, 7)))
    with caplog.at_level(logging.WARNING):
        run(data, batches=30, max_fault_rate=1.0)
    lines = [r.message for r in caplog.records if "image_decode_error" in r.message]
    assert len(lines) == 2 and "first in" in lines[0] and "×" in lines[1]


def test_a_killed_worker_is_reported(tmp_path):
    data = write(tmp_path / "d", (100, 100))
    one = loader(data, batches=500, workers=2)
    items = iter(one)
    next(items), next(items)
    os.kill(next(iter(one.rss_bytes)), signal.SIGKILL)
    with pytest.raises(RunError, match=r"killed by SIGKILL, \d+ MiB"):
        for _ in items:
            pass


@pytest.fixture
def backgrounded():
    """As in what a script starts with ``&``: SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_read_that_hangs_ends_with_the_stacks(workers, capfd, backgrounded):
    list(torch.utils.data.DataLoader([0], num_workers=workers))  # leaves torch's handler of dead workers behind
    start = time.monotonic()
    with pytest.raises(RunError, match="no batch for 1 s"):
        run("pipe:sleep 60", workers=workers, timeout_s=1)
    assert time.monotonic() - start < 30
    assert "fetch.py" in capfd.readouterr().err


def test_bad_settings_are_refused(tmp_path):
    data = write(tmp_path / "d", (5,))
    for options in ({"batch_size": 0}, {"workers": -1}, {"batches": 0}):
        with pytest.raises(UserError):
            loader(data, **options)
    for bad in ("", str(tmp_path / "none*.tar"), f"{data}::", str(tmp_path)[:-1] + "{0..3"):
        with pytest.raises(UserError):
            loader(bad)
    with pytest.raises(UserError, match="not understood"):
        loader(data, filters=("punsafe",))


@pytest.mark.slow
def test_memory_stays_flat_over_passes(tmp_path):
    data = write(tmp_path / "d", (50, 50), bad={3})
    one = loader(data, batches=1200, batch_size=16, workers=1, max_fault_rate=1.0, shuffle_buffer_mib=0.1)
    sizes = []
    for _ in one:
        sizes.append(max(one.rss_bytes.values()))
    assert sizes[-1] - sizes[300] < 8 * 2**20
