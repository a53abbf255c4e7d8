"""The classifier equals OpenCLIP's, however it is cut, chunked, cached or short of memory."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from clip_linear.errors import UserError
from clip_linear.registry import list_variants, variant_info
from clip_linear_eval import classifier as module
from clip_linear_eval.classifier import build_classifier
from clip_linear_eval.features import Batcher, inference
from clip_linear_eval.prompts import load_templates
from clip_linear_eval.tokens import by_words, token_lengths
from tests.eval.evalsets import CONFIG, NAMES

TEMPLATES = ["a photo of {c}.", "{c}", "a rather long drawing of one small {c} in the sun"]


def theirs(model, tokenizer, templates=TEMPLATES):
    from open_clip import build_zero_shot_classifier

    return build_zero_shot_classifier(model, tokenizer, NAMES, [t.replace("{c}", "{}") for t in templates])


def ours(model, tokenizer, templates=TEMPLATES, **more):
    with inference(model, "fp32", "cpu"):
        return build_classifier(model, tokenizer, NAMES, load_templates(templates), **more)


def assert_close(a, b) -> None:
    assert a.shape == b.shape and (a - b).abs().max() < 2e-6, (a - b).abs().max()


def lengths_seen(model, function) -> list[int]:
    """Sequence lengths that the text tower saw while a function ran, batch by batch."""
    tower = model.transformer if hasattr(model, "transformer") else model.text.transformer
    seen: list[int] = []
    hook = tower.resblocks[0].register_forward_pre_hook(
        lambda block, args, kwargs: seen.append((args or tuple(kwargs.values()))[0].shape[1]), with_kwargs=True
    )
    function()
    hook.remove()
    return seen


def make(config: dict, tmp_path: Path, name: str = "ViT-other"):
    from clip_linear.factory import create_model_and_transforms, get_tokenizer

    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(config))
    torch.manual_seed(1)
    model = create_model_and_transforms(str(path))[0].eval()
    return model, get_tokenizer(str(path))


def test_equals_openclip_and_cuts_prompts(clip) -> None:
    model, _, tokenizer = clip
    assert_close(ours(model, tokenizer), theirs(model, tokenizer))
    seen = lengths_seen(model, lambda: ours(model, tokenizer))
    assert seen[0] == 20 and len(seen) > 2  # a few prompts in full, to compare
    assert max(seen[1:]) < 20


@pytest.mark.parametrize("causal", [True, False])
def test_custom_text_tower(tmp_path: Path, causal: bool) -> None:
    config = copy.deepcopy(CONFIG) | {"custom_text": True}
    config["text_cfg"] |= {"no_causal_mask": not causal}
    model, tokenizer = make(config, tmp_path, f"ViT-custom-{causal}")
    assert_close(ours(model, tokenizer), theirs(model, tokenizer))
    seen = lengths_seen(model, lambda: ours(model, tokenizer))
    assert (max(seen[1:]) < 20) if causal else (set(seen) == {20})


@pytest.mark.parametrize("variant", list_variants())
def test_every_variant_in_the_text_tower(tmp_path: Path, variant: str) -> None:
    if "text" not in variant_info(variant).towers:
        pytest.skip(f"{variant} has no text tower")
    config = copy.deepcopy(CONFIG)
    config["text_cfg"]["linear_attn"] = {"kind": variant}
    model, tokenizer = make(config, tmp_path, f"ViT-text-{variant}")
    assert_close(ours(model, tokenizer), theirs(model, tokenizer))


def test_a_tower_that_minds_the_length_is_given_all_of_it(tmp_path: Path) -> None:
    model, tokenizer = make(CONFIG, tmp_path, "ViT-minds")

    class Minds(torch.nn.Module):
        def forward(self, x, attn_mask=None):
            return x * (1 + torch.arange(x.shape[-1]) * x.shape[1])  # another feature for another length

        def get_cast_dtype(self):
            return torch.float32

    class Refuses(Minds):
        def forward(self, x, attn_mask=None):
            return x + torch.ones(1, 20, 1)

    for tower in (Minds(), Refuses()):
        model.transformer = tower
        assert_close(ours(model, tokenizer), theirs(model, tokenizer))


def test_chunks_and_ranks_do_not_matter(clip, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, tokenizer = clip
    expected = ours(model, tokenizer)
    monkeypatch.setattr(module, "_CHUNK_PROMPTS", 7)  # two classes of three prompts
    assert_close(ours(model, tokenizer), expected)
    parts = []
    monkeypatch.setattr(module, "_sum_ranks", lambda part, classes, device: parts.append(part) or part)
    for rank in range(3):
        ours(model, tokenizer, rank=rank, world_size=3)
    assert torch.equal(sum(parts).T, ours(model, tokenizer))


def test_prompts_per_class(clip, tmp_path: Path) -> None:
    model, _, tokenizer = clip
    prompts = {name: [f"{name} number {i}" for i in range(1 + j % 3)] for j, name in enumerate(NAMES)}
    columns = []
    with torch.no_grad():
        for name in NAMES:
            mean = model.encode_text(tokenizer(prompts[name]), normalize=True).mean(0)
            columns.append(mean / mean.norm())
    path = tmp_path / "cupl.json"
    path.write_text(json.dumps(prompts))
    assert_close(ours(model, tokenizer, path), torch.stack(columns, 1))
    templates = load_templates({"cat": ["a cat"]})
    with pytest.raises(UserError, match="no prompts for 'wild dog'"):
        templates.check(NAMES)


def test_cache_is_keyed_by_weights_names_and_templates(clip, tmp_path: Path) -> None:
    model, _, tokenizer = clip
    first = ours(model, tokenizer, cache=tmp_path)
    assert lengths_seen(model, lambda: ours(model, tokenizer, cache=tmp_path)) == []
    assert torch.equal(ours(model, tokenizer, cache=tmp_path), first)
    assert lengths_seen(model, lambda: ours(model, tokenizer, TEMPLATES[:2], cache=tmp_path))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.text_projection[0, 0] += 1
    assert_close(ours(other, tokenizer, cache=tmp_path), theirs(other, tokenizer))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.visual.proj[0, 0] += 1  # the image tower does not matter
    assert lengths_seen(other, lambda: ours(other, tokenizer, cache=tmp_path)) == []


def test_tokens_are_read_from_disk(clip, tmp_path: Path) -> None:
    model, _, tokenizer = clip
    calls = []

    class Counting:
        def __call__(self, texts):
            calls.append(len(texts))
            return tokenizer(texts)

        def __getattr__(self, name):
            return getattr(tokenizer, name)

    counting = Counting()
    expected = ours(model, counting, cache=tmp_path)
    assert max(calls) == 3 * len(NAMES)  # the sample that is compared; longer lists are compared in part
    calls.clear()
    for file in (tmp_path / "classifiers").iterdir():
        file.unlink()
    assert torch.equal(ours(model, counting, cache=tmp_path), expected)
    assert not calls or max(calls) <= 4  # the probe of a few prompts at most


def test_batches_halve_when_memory_runs_out() -> None:
    sizes = []

    def greedy(batch):
        sizes.append(len(batch))
        if len(batch) > 3:
            raise torch.OutOfMemoryError("out of memory")
        return batch * 2

    run = Batcher(greedy)
    batch = torch.arange(16.0)[:, None]
    assert torch.equal(run(batch), batch * 2)
    assert sizes[:3] == [16, 8, 4] and set(sizes[3:]) == {2}
    sizes.clear()
    assert torch.equal(run(batch), batch * 2) and set(sizes) == {2}  # for good

    def broken(batch):
        raise RuntimeError("a shape is wrong")

    with pytest.raises(RuntimeError, match="a shape is wrong"):
        Batcher(broken)(batch)


def test_tokens_word_by_word_are_the_tokenizers(clip) -> None:
    tokenizer = clip[2]
    texts = [
        "A photo of a  cat.",
        "don't & won't",
        "x&amp;y",
        "a\tb",
        "naïve café",
        "",
        "12345 67",
        "🙂 smile",
        "I'LL go",
    ]
    texts += [
        "word " * 40,
        "<start_of_text> in it",
        "l'été",
        "a_b-c",
        "ﬁne “quotes”",
        "\u00a0nbsp",
        "ＦＵＬＬ",
        "!" * 30,
    ]
    found = by_words(tokenizer, texts)
    assert found is not None and np.array_equal(found, tokenizer(texts).numpy())
    assert by_words(lambda texts: tokenizer(texts), texts) is None

    class Other(type(tokenizer)):  # one that does something else with a word in the middle of the list
        def __call__(self, texts, context_length=None):
            return super().__call__([t.replace("cat", "dog") for t in texts], context_length)

    assert by_words(Other(context_length=20), texts) is None


def test_token_lengths() -> None:
    tokens = np.array([[5, 0, 7, 0, 0], [5, 7, 7, 7, 7], [0, 0, 0, 0, 0], [5, 0, 0, 0, 0]])
    assert token_lengths(tokens).tolist() == [3, 5, 1, 1]
