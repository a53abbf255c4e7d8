"""The tools that people use, on the embedded emoji sets: the same accuracies, to the image."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clip_linear.__main__ import main
from clip_linear.errors import RunError
from clip_linear_eval.zeroshot import evaluate
from tests.eval.evalsets import by_hand, value

SETS = ("twemoji_flags", "twemoji_unseen")


@pytest.fixture(scope="module")
def emoji(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import clip_linear.emoji

    root = tmp_path_factory.mktemp("emoji")
    clip_linear.emoji.write(root / "data")
    return root / "data" / "eval"


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_emoji_sets_equal_an_independent_computation(clip, emoji: Path, name: str) -> None:
    rows = evaluate(*clip, emoji / "imagefolder" / name)
    top1, top5 = by_hand(clip, emoji / "imagefolder" / name)
    assert 0 < top5 < rows[0]["n"]
    assert (rows[0]["correct"], rows[1]["correct"]) == (top1, top5)
    shards = evaluate(*clip, emoji / "wds" / f"wds_{name}")
    assert [r["value"] for r in shards] == [r["value"] for r in rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SETS, "twemoji_people"])
def test_emoji_sets_equal_openclip(clip, emoji: Path, name: str) -> None:
    import torch
    from open_clip import build_zero_shot_classifier
    from torchvision.datasets import ImageFolder

    root = emoji / "imagefolder" / name
    names = (root / "classnames.txt").read_text().split("\n")
    templates = (root / "zeroshot_classification_templates.txt").read_text().replace("{c}", "{}").split("\n")
    classifier = build_zero_shot_classifier(clip[0], clip[2], names, templates)
    hits, n = [0, 0], 0
    for images, target in torch.utils.data.DataLoader(ImageFolder(str(root), transform=clip[1]), batch_size=64):
        with torch.inference_mode():
            logits = 100.0 * clip[0](image=images)[0] @ classifier
        found = logits.topk(5).indices == target[:, None]
        hits = [hits[0] + int(found[:, 0].sum()), hits[1] + int(found.sum())]
        n += len(target)
    rows = evaluate(*clip, root)
    assert (value(rows, "top1"), value(rows, "top5"), rows[0]["n"]) == (hits[0] / n, hits[1] / n, n)


def clip_benchmark(clip, root: Path, name: str) -> dict[str, float]:
    """CLIP_benchmark 1.6.2's own numbers in float32; its accuracy fails under numpy 2.4 and is mended here."""
    why = "clip_benchmark is not installed; run: pip install 'clip-linear[peers]'"
    builder = pytest.importorskip("clip_benchmark.datasets.builder", reason=why)
    from clip_benchmark.metrics import zeroshot_classification, zeroshot_retrieval
    from torch.utils.data import DataLoader

    def accuracy(output, target, topk=(1,)):
        found = output.topk(max(topk), 1, True, True).indices == target[:, None]
        return [found[:, :k].sum().item() / len(target) for k in topk]

    zeroshot_classification.accuracy = accuracy
    retrieval = name == "twemoji_retrieval"
    task = "zeroshot_retrieval" if retrieval else "zeroshot_classification"
    data = builder.build_dataset(f"wds/{name}", root=str(root), transform=clip[1], split="test", task=task)
    loader = DataLoader(data.batched(64), batch_size=None, num_workers=0)
    if retrieval:
        return zeroshot_retrieval.evaluate(clip[0], loader, clip[2], "cpu", amp=False, recall_k_list=[1, 5, 10])
    return zeroshot_classification.evaluate(
        clip[0], loader, clip[2], data.classes, data.templates, "cpu", amp=False, verbose=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SETS, "twemoji_people", "twemoji_retrieval"])
def test_emoji_sets_equal_clip_benchmark(clip, emoji: Path, name: str) -> None:
    from clip_linear_eval.saved import clip_benchmark as renamed

    theirs = clip_benchmark(clip, emoji / "wds" / f"wds_{name}", name)
    ours = renamed(evaluate(*clip, emoji / "wds" / f"wds_{name}"))["metrics"]
    assert {k: ours[k] for k in theirs} == pytest.approx(theirs, abs=1e-7)  # its means are float32


def test_bench_passes_the_gate_and_times_everything(config: Path, weights: Path, folder: Path, capsys) -> None:
    flags = ["bench", "eval", "--model", str(config), "--pretrained", str(weights), "--dataset", str(folder)]
    assert main([*flags, "--rounds", "1", "--workers", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {"clip_linear", "clip_linear, tokens cached", "open_clip"} <= set(result["tools"])
    for tool in result["tools"].values():
        assert all(tool[part]["median"] > 0 for part in ("classifier_s", "evaluation_s", "evaluation_cpu_s"))
    assert (result["images"], result["classes"], result["prompts"]) == (28, 7, 14)
    assert main([*flags, "--rounds", "0"]) == 2


def test_bench_times_nothing_that_is_wrong(clip, folder: Path) -> None:
    import numpy as np

    from clip_linear_eval.models import Loaded
    from clip_linear_launch.bench_eval import Case, Ours

    case = Case(Loaded(model=clip[0], preprocess=clip[1], tokenizer=clip[2]), folder, 64, 1, "cpu")
    first = Ours(case).evaluate()
    assert case.check("same", first) == []
    wrong = np.where(np.arange(len(first)) == 3, (first + 1) % 7, first)
    with pytest.raises(RunError, match="differ on 1 images"):
        case.check("wrong", wrong)
    case.margin[3] = 1e-5
    assert case.check("near", wrong) == [case.data.files[3]]
