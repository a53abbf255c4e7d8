"""Twenty steps of our loop and of ``open_clip_train.main``: same seed, flags and batches, so the same losses."""

import json
from pathlib import Path

import pytest

from tests.clip_linear.train_helpers import FakeLoader, argv, codes, global_batch, rows, start, start_call

STEPS, BATCH = 20, 16


def _theirs(args, out):
    """OpenCLIP's own main in another process, unmodified but for where its batches come from and who reads its loss."""
    import logging

    import torch
    from open_clip_train import main as module
    from open_clip_train.data import DataInfo

    from clip_linear.run import with_known_models

    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    accum = int(args[args.index("--accum-freq") + 1]) if "--accum-freq" in args else 1

    class Batches(list):
        num_batches, num_samples = STEPS * accum, STEPS * accum * BATCH

    batches = Batches(global_batch(n, BATCH) for n in range(STEPS * accum))
    module.get_data = lambda *_, **__: {"train": DataInfo(batches)}
    make, losses = module.create_loss, []

    def create_loss(flags):
        loss = make(flags)
        loss.register_forward_hook(lambda m, i, o: losses.append(o["contrastive_loss"].item()))
        return loss

    module.create_loss = create_loss
    module.main(with_known_models(args))
    Path(out).write_text(json.dumps(losses[accum - 1 :: accum]))


CASES = {
    "clip, untouched": ("", []),
    "clip, softmax": ("+softmax+softmax", []),
    "clip, mala": ("+mala+mala", []),
    "siglip, softmax": ("+softmax+softmax", ["--siglip"]),
    "siglip, mala": ("+mala+mala", ["--siglip"]),
    "mala, patch dropout": ("+mala+mala", ["--force-patch-dropout", "0.25"]),
    "accumulation as OpenCLIP scales it": ("+mala", ["--accum-freq", "2"]),
    "amp_bf16, constant with cooldown": (
        "+mala",
        ["--precision", "amp_bf16", "--lr-scheduler", "const-cooldown", "--epochs-cooldown", "1"],
    ),
}


QUICK = ("clip, mala", "siglip, mala", "mala, patch dropout")  # the others are marked slow


@pytest.mark.parametrize(
    "suffix, extra",
    [pytest.param(*c, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name, c in CASES.items()],
)
def test_losses_are_openclips(tmp_path, suffix, extra):
    accum = 2 if "--accum-freq" in extra else 1
    numbers = {"lr": 1e-3, "wd": 0.1, "warmup": 5, "seed": 3, "batch-size": BATCH, "grad-clip-norm": 1.0}
    ours = argv(tmp_path, *extra, "--no-fused-optimizer", model_suffix=suffix, **numbers, samples=STEPS * BATCH * accum)
    ours += ["--train-num-samples", str(STEPS * BATCH * accum), "--epochs", "1"]
    if accum > 1:
        ours.append("--openclip-accum-scale")
    theirs = [a for a in ours if a not in ("--no-fused-optimizer", "--openclip-accum-scale")]
    for flag in ("--samples", "--run-dir"):
        del theirs[theirs.index(flag) : theirs.index(flag) + 2]
    theirs += ["--logs", str(tmp_path / "logs"), "--name", "theirs", "--dataset-type", "webdataset"]
    both = [start_call(_theirs, theirs, str(tmp_path / "theirs.json")), start(ours, FakeLoader, OMP_NUM_THREADS=1)]
    assert codes(both) == [0, 0]
    expected = json.loads((tmp_path / "theirs.json").read_text())
    found = [row["loss"] for row in rows(tmp_path / "run")]
    assert len(expected) == len(found) == STEPS
    assert found == pytest.approx(expected, rel=1e-6)
    assert found[-1] < found[0]
