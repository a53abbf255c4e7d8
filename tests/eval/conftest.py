"""A tiny CLIP with fixed random weights and a small set for the evaluation tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.eval.evalsets import CONFIG, NAMES, write_folder


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "ViT-tiny-test.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="session")
def clip(config: Path):  # (model, preprocess, tokenizer), random weights
    import torch

    from clip_linear.factory import create_model_and_transforms, get_tokenizer

    torch.manual_seed(0)
    model, _, preprocess = create_model_and_transforms(str(config))
    with torch.no_grad():  # make pictures matter: a fresh model gives nearly the same feature to all
        model.visual.conv1.weight *= 30
        model.visual.proj *= 10
    return model.eval(), preprocess, get_tokenizer(str(config))


@pytest.fixture(scope="session")
def weights(clip, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    path = tmp_path_factory.mktemp("weights") / "tiny.pt"
    torch.save({"state_dict": clip[0].state_dict(), "samples_seen": 640, "epoch": 1, "name": "tiny"}, path)
    return path


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven classes of four images, numbered folders, own names and templates."""
    root = tmp_path_factory.mktemp("sets") / "tiny"
    return write_folder(root, [f"{i:04d}" for i in range(len(NAMES))], 4, NAMES)


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIP_LINEAR_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
