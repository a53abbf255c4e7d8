"""Real training by the product's own command on the local Slurm: the demo's smallest model, on one and on two nodes."""

import json

import pytest

from clip_linear.files import read_jsonl
from tests.slurm import cluster

pytestmark = pytest.mark.slurm
STEPS = 40
TIMES = {"t", "samples_per_s", "data_wait_frac", "step_s", "rss_gib", "device_gib", "save_s", "mfu", "tokens_per_s"}


@pytest.fixture(scope="session")
def emoji_data(slurm, tmp_path_factory):
    from clip_linear import emoji

    folder = tmp_path_factory.getbasetemp().parent / "emoji-data"
    emoji.write(folder)
    return folder


class Real(cluster.Cluster):
    """One real run, two samples a rank and step."""

    def __init__(self, folder, data, resources, ranks):
        folder.mkdir()
        super().__init__(folder)
        self.toml.write_text(
            f'[sweep]\nname = "mini"\nroot = "out"\nbackend = "slurm"\n'
            f'[base]\ntrain-data = "{data}/train/*.tar"\nbatch-size = {32 // ranks}\nlr = 1e-3\n'
            f'warmup = 5\nworkers = 0\nprecision = "fp32"\nlog-every-n-steps = 1\n'
            f'[grid]\nmodel = ["{data}/configs/ViT-emoji-w16.json"]\nimage = ["mala"]\nsamples = [{32 * STEPS}]\n'
            f'[resources]\ntime = 10\ncpus_per_task = 1\nexclude = ["node3", "node4"]\n{resources}\n'
            f'[limits]\nsignal_delay_s = 60\n[eval]\ndatasets = ["{data}/eval/imagefolder/twemoji_flags"]\n'
        )

    def losses(self):
        rows = read_jsonl(self.run_dir() / "metrics.jsonl")
        return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]

    def weights(self):
        import torch

        newest = max((self.run_dir() / "checkpoints").glob("*.pt"), key=lambda p: p.stat().st_mtime)
        return torch.load(newest, weights_only=True, map_location="cpu")["state_dict"]


@pytest.mark.timeout(600)
def test_one_and_two_nodes_and_a_requeue_in_between(emoji_data, tmp_path):
    # Two runs of two ranks share node1 at the same time: they would meet each other if ports or files could collide.
    one_node = 'nodelist = "node1"\ntasks_per_node = 2'
    alone = Real(tmp_path / "alone", emoji_data, "", ranks=1)
    plain = Real(tmp_path / "plain", emoji_data, one_node, ranks=2)
    hit = Real(tmp_path / "hit", emoji_data, one_node, ranks=2)
    wide = Real(tmp_path / "wide", emoji_data, "nodes = 2", ranks=2)
    runs = [alone, plain, hit, wide]
    try:
        for run in (hit, plain, wide, alone):
            run.launch("run")
        hit.until(lambda: len(read_jsonl(hit.run_dir() / "metrics.jsonl")) >= 5, "five steps", 240, 0.1)
        cluster.slurm("scancel", "--signal=USR2", hit.job())
        for run in runs:
            run.wait_for("DONE", timeout_s=400)
    finally:
        for run in runs:
            run.end()
    assert [a["class"] for a in hit.attempts()] == ["timeout", "done"]
    assert 5 <= hit.attempts()[1]["start_step"] == hit.attempts()[0]["end_step"] < STEPS
    assert [row["step"] for row in plain.losses()] == list(range(1, STEPS + 1))
    assert hit.losses() == plain.losses() == wide.losses()  # every float, bit for bit
    ours, theirs = hit.weights(), plain.weights()
    assert ours.keys() == theirs.keys() and all((ours[k] == theirs[k]).all() for k in ours)
    assert {run.run_dir().name for run in runs[1:]} == {plain.run_dir().name}
    rows = json.loads(alone.launch("collect", "--json"))
    assert {"top1", "top5", "loss"} <= {r["metric"] for r in rows} and all(r["provenance"] == "measured" for r in rows)
