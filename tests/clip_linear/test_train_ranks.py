"""Several ranks (gloo, one machine): equal to one process, and ending together."""

import json
import os
import signal
import time

import pytest
import torch

from clip_linear.errors import UserError
from clip_linear.train import checkpoint
from clip_linear.train.loop import train
from clip_linear.train.place import Place, place
from tests.clip_linear.train_helpers import (
    FakeLoader,
    argv,
    codes,
    config,
    rows,
    start,
    start_evaluating,
    start_ranks,
    write_eval_set,
)

GATHER = ["--local-loss", "--gather-with-grad"]


@pytest.mark.parametrize(
    "loss, accum",
    [
        pytest.param(GATHER, 1, id="clip-1"),
        pytest.param(["--siglip"], 2, id="siglip-2"),
        pytest.param(GATHER, 2, id="clip-2", marks=pytest.mark.slow),
        pytest.param(["--siglip"], 1, id="siglip-1", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_equal_one_process_with_the_doubled_batch(tmp_path, loss, accum):
    flags = {"samples": 20 * 16 * accum, "accum-freq": accum, "lr": 1e-3}
    one = config(tmp_path, *loss, **flags, batch_size=16, run_dir=tmp_path / "one")
    assert train(one, make_loader=FakeLoader) == 0
    assert codes(start_ranks(2, argv(tmp_path, *loss, **flags, batch_size=8, run_dir=tmp_path / "two"))) == [0, 0]
    single, double = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert len(single) == len(double) == 20
    for a, b in zip(single, double):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("accum", [2, 4])
def test_accumulation_equals_the_big_batch(tmp_path, accum):
    """All gradients, logit_scale's too (its norm share is what OpenCLIP gets wrong); the loaders give equal samples."""

    class Whole(FakeLoader):
        def __iter__(self):
            parts = list(super().__iter__())
            for i in range(0, len(parts), self.scale):
                group = parts[i : i + self.scale]
                group[0].images = torch.cat([g.images for g in group])
                group[0].texts = torch.cat([g.texts for g in group])
                yield group[0]

    flags = {"batch-size": 8, "samples": 8 * accum * 6, "lr": 1e-3}
    small = config(tmp_path, **flags, accum_freq=accum, run_dir=tmp_path / "small")
    assert train(small, make_loader=FakeLoader) == 0
    big = config(tmp_path, **flags, run_dir=tmp_path / "big")
    object.__setattr__(big, "ours", big.ours | {"samples": 8 * 6})

    def whole(cfg, *rest):
        loader = Whole(small, *rest)
        loader.scale = accum
        return loader

    assert train(big, make_loader=whole) == 0
    for a, b in zip(rows(tmp_path / "small"), rows(tmp_path / "big")):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-6)
        assert a["logit_scale"] == pytest.approx(b["logit_scale"], rel=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


class Signalled(FakeLoader):
    """Rank 1 (and only it) gets a signal at its fifth batch."""

    number = signal.SIGUSR2

    def __iter__(self):
        for batch in super().__iter__():
            if self.world.rank == 1 and batch.state["n"] == 5:
                os.kill(os.getpid(), self.number)
            yield batch


class Terminated(Signalled):
    number = signal.SIGTERM


@pytest.mark.parametrize("loader, code", [(Signalled, 75), pytest.param(Terminated, 143, marks=pytest.mark.slow)])
def test_all_ranks_stop_at_one_step_and_continue(tmp_path, loader, code):
    args = argv(tmp_path, *GATHER)
    assert codes(start_ranks(2, args, loader)) == [code, 0]
    assert checkpoint.steps_on_disk(tmp_path / "run") == [5]
    assert codes(start_ranks(2, args)) == [0, 0]
    whole = argv(tmp_path, *GATHER, run_dir=tmp_path / "whole")
    assert codes(start_ranks(2, whole)) == [0, 0]
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


class Dying(FakeLoader):
    def __iter__(self):
        for batch in super().__iter__():
            if self.world.rank == 1 and batch.state["n"] == 4:
                (self.config.run_dir / "died").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch


class Raising(FakeLoader):
    def __iter__(self):
        for batch in super().__iter__():
            if self.world.rank == 1 and batch.state["n"] == 4:
                (self.config.run_dir / "died").write_text(str(time.time()))
                raise RuntimeError("this very shard is cursed")
            yield batch


@pytest.mark.parametrize("loader, first, words", [(Dying, -9, "rank"), (Raising, 1, "this very shard is cursed")])
def test_a_dead_rank_takes_the_job_down(tmp_path, loader, first, words):
    ended = codes(start_ranks(2, argv(tmp_path, *GATHER), loader))
    assert time.time() - float((tmp_path / "run" / "died").read_text()) < 30
    assert ended == [1, first]
    failed = json.loads((tmp_path / "run" / "failed.json").read_text())
    assert words in failed["reason"] and "Traceback" in failed["traceback"]
    assert json.loads((tmp_path / "run" / "state.json").read_text())["state"] == "FAILED"


def test_ranks_that_differ_are_told_so(tmp_path):
    world = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    pair = [start(argv(tmp_path, *GATHER, lr=1e-3 * (i + 1)), RANK=i, LOCAL_RANK=i, **world) for i in range(2)]
    assert codes(pair) == [1, 1]
    assert "rank 1" in json.loads((tmp_path / "run" / "failed.json").read_text())["reason"]


def without_key_bias(name, value):
    """A bias of all keys cancels in softmax: its gradient is rounding noise, which Adam turns into steps of size lr."""
    if not name.endswith("in_proj_bias"):
        return value
    q, _, v = value.chunk(3)
    return torch.cat([q, v])


@pytest.mark.slow
def test_fsdp_equals_ddp_and_its_checkpoints_are_plain(tmp_path):
    flags = {"samples": 160, "grad-clip-norm": 0.1, "lr": 1e-3}
    assert codes(start_ranks(2, argv(tmp_path, *GATHER, **flags, run_dir=tmp_path / "ddp"))) == [0, 0]
    sharded = argv(tmp_path, *GATHER, "--fsdp", "--ema-decay", "0.5", **flags, save_every_steps=6)
    assert codes(start_ranks(2, sharded, Signalled)) == [75, 0]
    assert codes(start_ranks(2, sharded)) == [0, 0]
    for a, b in zip(rows(tmp_path / "run"), rows(tmp_path / "ddp")):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    plain, shards = (
        torch.load(tmp_path / name / "checkpoints" / "step_000000010.pt", weights_only=True) for name in ("ddp", "run")
    )
    assert {k: v.shape for k, v in plain["state_dict"].items()} == {k: v.shape for k, v in shards["state_dict"].items()}
    for k, v in plain["state_dict"].items():
        torch.testing.assert_close(
            without_key_bias(k, shards["state_dict"][k]), without_key_bias(k, v), rtol=1e-4, atol=1e-6
        )
    for i, state in plain["optimizer"]["state"].items():
        torch.testing.assert_close(shards["optimizer"]["state"][i]["exp_avg"], state["exp_avg"], rtol=1e-3, atol=1e-7)


ENV = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


def test_places():
    assert place({}) == Place()
    assert place({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "5", "SLURM_PROCID": "0"}) == Place()  # salloc without srun
    assert place(ENV | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}) == Place(3, 4, 1, 2)
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert place(torchrun) == Place(1, 2, 1, 2)
    assert place(ENV | torchrun | {"TORCHELASTIC_RUN_ID": "x"}) == Place(1, 2, 1, 2)
    with pytest.raises(UserError, match="contradict"):
        place(ENV | torchrun)
    with pytest.raises(UserError, match="rank 5"):
        place({"RANK": "5", "WORLD_SIZE": "2"})


@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], ["--fsdp"]], ids=["ddp", "fsdp"])
def test_evaluation_on_all_ranks_counts_exactly(tmp_path, extra):
    squares = write_eval_set(tmp_path / "squares")
    flags = ["--eval-data", squares, "--zeroshot-frequency", "3steps", "--ema-decay", "0.5", *GATHER, *extra]
    pair = [start_evaluating(argv(tmp_path, *flags), RANK=i, WORLD_SIZE=2, LOCAL_RANK=i) for i in range(2)]
    assert codes(pair) == [0, 0]
    found = [json.loads(line) for line in (tmp_path / "run" / "evals.jsonl").read_text().splitlines()]
    assert [f["step"] for f in found] == [3, 6]
    assert all(row["n"] == 8 for f in found for row in f["rows"])
    final = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert {row["metric"] for row in final} >= {"top1", "ece"} and final[0]["samples_seen"] == 96


def test_an_evaluation_error_loses_no_checkpoint(tmp_path):
    """In between training goes on; at the end it is an error, and starting again only evaluates."""
    calls = []

    def failing(*_, **__):
        calls.append(1)
        raise ValueError("the evaluation set was moved")

    cfg = config(tmp_path, "--zeroshot-frequency", "4steps")
    with pytest.raises(ValueError, match="was moved"):
        train(cfg, failing, FakeLoader)
    assert len(calls) == 3 and checkpoint.steps_on_disk(cfg.run_dir) == [8, 12]
    before = rows(cfg.run_dir)
    assert train(cfg, lambda *_, **__: [{"dataset": "d", "metric": "m", "value": 1.0, "gmacs": 2.0}], FakeLoader) == 0
    assert rows(cfg.run_dir) == before
    assert json.loads((cfg.run_dir / "eval.json").read_text())[0]["gmacs_total"] == 192.0


def test_a_mistake_on_several_ranks_is_one_line_and_code_2(tmp_path):
    ended = codes(start_ranks(2, argv(tmp_path, *GATHER, "--pretrained", "nothing")))
    assert 2 in ended and set(ended) <= {1, 2}
    assert "neither a file nor a tag" in json.loads((tmp_path / "run" / "failed.json").read_text())["reason"]
