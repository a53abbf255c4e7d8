"""Retrieval against brute force, in every layout, with captions of different number per image."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from clip_linear.errors import RunError, UserError
from clip_linear_eval import retrieval
from clip_linear_eval.zeroshot import evaluate
from tests.eval.evalsets import NAMES, image_bytes, write_tar

CAPTIONS = [[f"{NAMES[i % 7]} and {NAMES[j % 7]} number {i}" for j in range(1 + i % 4)] for i in range(30)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pairs") / "pairs"
    (root / "images").mkdir(parents=True)
    lines = []
    for i, captions in enumerate(CAPTIONS):
        (root / "images" / f"{i:03d}.jpg").write_bytes(image_bytes(i))
        lines.append(json.dumps({"image": f"images/{i:03d}.jpg", "captions": captions}))
    (root / "captions.jsonl").write_text("\n".join(lines))
    return root


def brute(clip, keep: list[int]) -> dict[str, float]:
    """Recalls from the full matrix, query by query."""

    model, preprocess, tokenizer = clip
    texts = [(i, c) for i in keep for c in CAPTIONS[i]]
    with torch.no_grad():
        images = model.encode_image(torch.stack([preprocess(_jpeg(i)) for i in keep]), normalize=True)
        encoded = model.encode_text(tokenizer([c for _, c in texts]), normalize=True)
    matrix = (images @ encoded.T).numpy()
    out = {}
    for k in (1, 5, 10):
        hits = [any(texts[j][0] == i for j in np.argsort(-matrix[row])[:k]) for row, i in enumerate(keep)]
        out[f"image_to_text_recall@{k}"] = float(np.mean(hits))
        hits = [i in [keep[j] for j in np.argsort(-matrix[:, c])[:k]] for c, (i, _) in enumerate(texts)]
        out[f"text_to_image_recall@{k}"] = float(np.mean(hits))
    return out


def _jpeg(seed: int):
    import io

    from PIL import Image

    return Image.open(io.BytesIO(image_bytes(seed))).convert("RGB")


def values(rows: list[dict]) -> dict[str, float]:
    return {row["metric"]: row["value"] for row in rows}


def test_equals_brute_force(clip, pairs: Path) -> None:
    rows = evaluate(*clip, pairs)
    assert values(rows) == pytest.approx(brute(clip, list(range(30))))
    assert 0 < values(rows)["image_to_text_recall@5"] < 1
    n = {row["metric"].split("_recall")[0]: row["n"] for row in rows}
    assert n == {"image_to_text": 30, "text_to_image": sum(map(len, CAPTIONS))}


def test_chunks_do_not_matter(clip, pairs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = values(evaluate(*clip, pairs))
    for name, size in (("_ROWS", 4), ("_COLUMNS", 7), ("_TEXTS", 9)):
        monkeypatch.setattr(retrieval, name, size)
    assert values(evaluate(*clip, pairs, batch_size=7)) == expected


def test_recall_at_k_never_asks_for_more_than_there_is() -> None:
    features = torch.eye(3)
    found = retrieval.recall(features, features, np.arange(3))
    assert all(count == 3 for count in found.values())


def test_layouts_agree(clip, pairs: Path, tmp_path: Path) -> None:
    expected = values(evaluate(*clip, pairs))
    members = []
    for i, captions in enumerate(CAPTIONS):
        members += [(f"s{i:04d}.jpg", image_bytes(i)), (f"s{i:04d}.txt", "\n".join(captions).encode())]
    write_tar(tmp_path / "wds" / "test" / "0.tar", members)
    (tmp_path / "wds" / "dataset_type.txt").write_text("retrieval")
    assert values(evaluate(*clip, tmp_path / "wds")) == expected

    images = [
        {
            "filepath": "val2014",
            "filename": f"{i:03d}.jpg",
            "split": "test",
            "sentences": [{"raw": c} for c in captions],
        }
        for i, captions in enumerate(CAPTIONS)
    ]
    images.append({"filename": "999.jpg", "split": "train", "sentences": [{"raw": "not this split"}]})
    (pairs / "dataset_coco.json").write_text(json.dumps({"images": images}))
    assert values(evaluate(*clip, pairs / "dataset_coco.json")) == expected

    rows = ["filepath\ttitle"]
    rows += [f"images/{i:03d}.jpg\t{caption}" for i, captions in enumerate(CAPTIONS) for caption in captions]
    (pairs / "pairs.tsv").write_text("\n".join(rows))
    assert values(evaluate(*clip, pairs / "pairs.tsv", dataset_type="retrieval")) == expected


def test_a_bad_image_leaves_with_its_captions(clip, tmp_path: Path) -> None:
    rows = ["filepath,caption"]
    for i, captions in enumerate(CAPTIONS):
        (tmp_path / f"{i}.jpg").write_bytes(image_bytes(i) if i != 7 else b"torn")
        rows += [f"{i}.jpg,{caption}" for caption in captions]
    (tmp_path / "pairs.csv").write_text("\n".join(rows))
    with pytest.raises(RunError, match=r"7\.jpg"):
        evaluate(*clip, tmp_path / "pairs.csv")
    found = evaluate(*clip, tmp_path / "pairs.csv", on_error="skip")
    assert values(found) == pytest.approx(brute(clip, [i for i in range(30) if i != 7]))
    assert [e["file"] for e in found[0]["errors"]] == ["7.jpg"]


def test_classes_are_no_captions(clip, folder: Path) -> None:
    with pytest.raises(UserError, match="no captions"):
        evaluate(*clip, folder, dataset_type="retrieval")
