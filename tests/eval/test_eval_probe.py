"""Linear probe and nearest neighbours: against scikit-learn by hand, with the test set left out of every choice."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from clip_linear.errors import UserError
from clip_linear_eval import probe
from clip_linear_eval.probe import measure_probe
from clip_linear_eval.settings import Settings
from tests.eval.evalsets import NAMES, picture

pytest.importorskip("sklearn")


def write(root: Path, seeds: range) -> Path:
    """Seven classes: one picture each, with noise of its own on every copy."""
    from PIL import Image

    for c in range(7):
        (root / f"{c:04d}").mkdir(parents=True)
        for seed in seeds:
            noise = np.random.default_rng(1000 * c + seed).normal(0, 60, (40 + c % 5, 40, 3))
            image = np.clip(np.asarray(picture(c)) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(image).save(root / f"{c:04d}" / f"{seed}.png")
    (root / "classnames.txt").write_text("\n".join(NAMES))
    return root


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("probe")
    return write(root / "train", range(10)), write(root / "test", range(10, 16))


def features(clip, root: Path) -> tuple[np.ndarray, np.ndarray]:
    from PIL import Image

    paths = sorted(root.glob("*/*.png"))
    with torch.no_grad():
        images = torch.stack([clip[1](Image.open(p).convert("RGB")) for p in paths])
        x = clip[0].encode_image(images, normalize=True).numpy()
    return x, np.array([p.parent.name for p in paths])


@pytest.mark.parametrize("kind", ["linear", "knn"])
def test_equals_scikit_learn(clip, sets: tuple[Path, Path], kind: str) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier

    row = measure_probe(kind, *clip[:2], *sets, Settings()).rows[0]
    (x, y), (queries, truth) = features(clip, sets[0]), features(clip, sets[1])
    if kind == "linear":
        scale = x.shape[1] ** 0.5
        model = LogisticRegression(C=row["chosen"], max_iter=1000).fit(x * scale, y)
        accuracy = model.score(queries * scale, truth)
    else:
        model = KNeighborsClassifier(
            int(row["chosen"]), metric="cosine", weights=lambda d: np.exp((1 - d) / probe._KNN_TEMPERATURE)
        )
        accuracy = model.fit(x, y).score(queries, truth)
    assert row["value"] == pytest.approx(accuracy) and row["value"] > 1 / 7
    assert (row["n"], row["n_train"], row["unit"]) == (42, 70, "fraction")


def test_a_fifth_of_each_class_is_held_out() -> None:
    y = np.array(["a"] * 10 + ["b"] * 3 + ["c"])
    held = probe._held_out(y)
    assert [int(held[y == c].sum()) for c in "abc"] == [2, 1, 0]
    with pytest.raises(UserError, match="one image per class"):
        probe._held_out(np.array(["a", "b"]))


def test_classes_that_training_lacks_are_listed(clip, sets: tuple[Path, Path], tmp_path: Path) -> None:
    part = shutil.copytree(sets[0], tmp_path / "part")
    shutil.rmtree(part / "0004")
    with pytest.raises(UserError, match="lacks: '0004'"):
        measure_probe("knn", *clip[:2], part, sets[1], Settings())


def test_command(config: Path, weights: Path, sets: tuple[Path, Path], capsys) -> None:
    import json

    from clip_linear.__main__ import main

    argv = ["eval", "--model", str(config), "--pretrained", str(weights), "--dataset", str(sets[1]), "--json"]
    assert main([*argv, "--probe", "knn", "--train-dataset", str(sets[0])]) == 0
    assert [r["metric"] for r in json.loads(capsys.readouterr().out)] == ["knn_top1"]
    assert main([*argv, "--probe", "knn"]) == 2
    assert "--train-dataset" in capsys.readouterr().err
