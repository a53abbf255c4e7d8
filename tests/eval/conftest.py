"""A tiny CLIP with fixed random weights and a small set for the evaluation tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.eval.evalsets import CONFIG, NAMES, picture, write_folder


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "ViT-tiny-eval.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="session")
def clip(config: Path):  # (model, preprocess, tokenizer)
    """Random weights, with the features of random pictures and texts centred: a fresh model gives nearly the same
    feature to every picture and could not tell a right evaluation from a wrong one."""
    import torch
    from open_clip import IMAGENET_CLASSNAMES

    from clip_linear.factory import create_model_and_transforms, get_tokenizer

    torch.manual_seed(0)
    model, _, preprocess = create_model_and_transforms(str(config))
    tokenizer = get_tokenizer(str(config))
    model.eval()
    pictures = torch.stack([preprocess(picture(seed)) for seed in range(64)])
    texts = tokenizer([f"a photo of a {name}." for name in IMAGENET_CLASSNAMES[:64]])
    seen = []
    with torch.no_grad():
        for norm in (model.visual.ln_post, model.ln_final):
            norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
        model(pictures, texts)
        model.visual.ln_post.bias -= seen[0][:, 0].mean(0)
        model.ln_final.bias -= seen[1][torch.arange(64), texts.argmax(1)].mean(0)
    for norm in (model.visual.ln_post, model.ln_final):
        norm._forward_hooks.clear()
    return model, preprocess, tokenizer


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
