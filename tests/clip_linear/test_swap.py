"""The swap in OpenCLIP models: what changes, and above all what does not."""

import copy
import importlib
import json
import subprocess
import sys

import open_clip
import pytest
import torch
from safetensors.torch import save_file

import clip_linear
from clip_linear import list_variants, marker
from clip_linear.errors import UserError
from clip_linear.openclip import register
from clip_linear.registry import declaration
from tests.clip_linear.swap_helpers import TEXT, TOY, VISION, batch, build

PRESETS = [f"{v}.{p}" for v in list_variants() for p in declaration(v).info.presets]


@pytest.fixture
def toy_name(tmp_path):
    """The toy's config, known to OpenCLIP under a name of its own."""
    path = tmp_path / f"ViT-{tmp_path.name}.json"
    path.write_text(json.dumps(TOY))
    open_clip.add_model_config(path)
    yield path.stem
    open_clip.factory._MODEL_CONFIGS.pop(path.stem)


def vanilla(config=TOY, seed=0):
    """Built by the untouched constructor."""
    torch.manual_seed(seed)
    model = open_clip.model.CLIP.__new__(open_clip.model.CLIP)
    register()
    open_clip.model.CLIP.__init__.__wrapped__(model, **copy.deepcopy(config))
    return model


def equal_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    return list(a) == list(b) and all(torch.equal(x, y) for x, y in zip(a.values(), b.values()))


def test_register_is_idempotent():
    register()
    before = (open_clip.model.CLIP.__init__, open_clip.get_model_config, open_clip.factory.get_pretrained_cfg)
    register()
    assert before == (open_clip.model.CLIP.__init__, open_clip.get_model_config, open_clip.factory.get_pretrained_cfg)


def test_unswapped_models_are_bit_identical():
    ours, theirs = build(), vanilla()
    assert equal_state(ours, theirs) and [type(m) for m in ours.modules()] == [type(m) for m in theirs.modules()]
    images, texts = batch()
    for a, b in zip(ours(images, texts), theirs(images, texts)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("preset", PRESETS)
def test_names_values_and_random_stream_are_those_of_softmax(preset):
    plain = vanilla()
    after = torch.rand(3)
    swapped = build(image=preset, text=preset)
    assert torch.equal(torch.rand(3), after)  # extra parameters drew nothing from the stream
    own = swapped.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(own.pop(name), value), name
    assert all(".attn.body." in n or n == marker.NAME for n in own)
    assert (marker.NAME in own) == (preset != "softmax.core")
    images, texts = batch()
    out = swapped(images, texts)
    sum(o.sum() for o in out).backward()
    assert not [n for n, p in swapped.named_parameters() if p.grad is None]  # DDP wants every parameter used
    if preset == "softmax.core":
        for a, b in zip(out, plain(images, texts)):
            assert torch.allclose(a, b, atol=1e-6)
    else:
        assert not torch.allclose(out[0], plain(images, texts)[0], atol=1e-3)


@pytest.mark.parametrize("preset", PRESETS)
def test_text_towers_are_causal(preset):
    """Token ids behind the end of text do not matter; with a table, rope or convolution neither."""
    model = build(text=preset).eval()
    _, texts = batch()
    other = texts.clone()
    for row in range(len(texts)):
        other[row, int(texts[row].argmax()) + 1 :] = 7
    assert torch.allclose(model.encode_text(texts), model.encode_text(other), atol=1e-6)


def test_names_through_openclip(toy_name):
    register()
    model = open_clip.create_model(f"{toy_name}+mala.paper+elu")
    assert model.visual.transformer.resblocks[0].attn.body.variant.info.name == "mala"
    assert model.transformer.resblocks[1].attn.body.variant.info.name == "elu"
    model, _, preprocess = open_clip.create_model_and_transforms(f"{toy_name}+softmax")
    assert not hasattr(model.transformer.resblocks[0].attn, "body") and callable(preprocess)
    assert open_clip.get_tokenizer(f"{toy_name}+mala").context_length == TEXT["context_length"]
    assert open_clip.get_model_config(f"{toy_name}+mala")["vision_cfg"]["linear_attn"]["kind"] == "mala"
    assert open_clip.get_model_config("no-such-model+mala") is None
    with pytest.raises(UserError, match="did you mean 'mala'"):
        open_clip.create_model(f"{toy_name}+malla")
    with pytest.raises(UserError, match="no published module"):
        open_clip.create_model(f"{toy_name}+elu.paper")
    with pytest.raises(UserError, match="NAME"):
        open_clip.create_model(f"{toy_name}+elu+elu+elu")
    with pytest.raises(RuntimeError, match="no-such-model"):
        open_clip.create_model("no-such-model+mala")


def test_pretrained_tags_of_the_base_name():
    register()
    found = open_clip.factory.get_pretrained_cfg("ViT-B-16+mala", "laion2b_s34b_b88k")
    assert found and found == open_clip.factory.get_pretrained_cfg("ViT-B-16", "laion2b_s34b_b88k")
    assert not open_clip.factory.get_pretrained_cfg("ViT-B-16+mala", "no_such_tag")


def test_paths_of_configs(tmp_path):
    path = tmp_path / "ViT-toy-path.json"
    path.write_text(json.dumps(TOY))
    model = clip_linear.create_model(f"{path}+hydra+relu")
    assert model.visual.transformer.resblocks[0].attn.body.variant.info.name == "hydra"
    path.write_text(json.dumps({**TOY, "vision_cfg": {**VISION, "linear_attn": {"kind": "elu", "layers": [1]}}}))
    (tmp_path / "b").mkdir()
    other = path.rename(tmp_path / "b" / "ViT-toy-own.json")
    blocks = clip_linear.create_model(str(other)).visual.transformer.resblocks
    assert [hasattr(b.attn, "body") for b in blocks] == [False, True, False]


def test_without_register_a_swapped_config_is_refused():
    config = {**TOY, "vision_cfg": {**VISION, "linear_attn": {"kind": "elu"}}}
    code = f"from open_clip.model import CLIP\nCLIP(**{config!r})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode and "TypeError" in out.stderr and "linear_attn" in out.stderr


@pytest.mark.parametrize("preset", ["mala.core", "nala.paper", "pola.paper", "performer.core"])
def test_softmax_checkpoints_load_with_one_warning(preset, tmp_path, toy_name, caplog, monkeypatch):
    monkeypatch.setattr(marker, "_warned", set())
    path = tmp_path / "softmax.pt"
    torch.save({"state_dict": {f"module.{k}": v for k, v in vanilla(seed=5).state_dict().items()}}, path)
    register()
    model = open_clip.create_model(f"{toy_name}+{preset}+{preset}", pretrained=str(path))
    assert torch.equal(model.text_projection, vanilla(seed=5).text_projection)
    warned = [r.message for r in caplog.records if "softmax" in r.message or "initial values" in r.message]
    assert len(warned) == (1 if preset == "mala.core" else 2)


def test_half_of_the_extras_is_an_error():
    state = build(image="pola").state_dict()
    state.pop("visual.transformer.resblocks.1.attn.body.variant.power")
    with pytest.raises(RuntimeError, match=r"Missing key.*power"):
        build(image="pola").load_state_dict(state)


def test_linear_checkpoints_do_not_load_elsewhere():
    state = build(image="mala", text="elu").state_dict()
    with pytest.raises(RuntimeError, match="clip_linear_spec"):
        vanilla().load_state_dict(state)
    for image, text in (("elu", "elu"), ("mala", None), ("softmax", "softmax"), ("mala.paper", "elu")):
        with pytest.raises(UserError, match='"kind":"mala"'):
            build(image=image, text=text).load_state_dict(state)
    build(image="mala", text="elu").load_state_dict(state)
    vanilla().load_state_dict(marker.strip_spec(state))


def test_the_marker_survives_averaging_and_meta_loading():
    model = build(image="mala")
    averaged = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    for _ in range(3):
        averaged.update_parameters(model)
    build(image="mala").load_state_dict(averaged.module.state_dict())
    with torch.device("meta"):
        empty = build(image="mala")
    empty = empty.to_empty(device="cpu")
    assert torch.equal(empty.state_dict()[marker.NAME], model.state_dict()[marker.NAME])
    empty.load_state_dict(model.state_dict())
    dress = {"rope": True, "norm": True, "gate": "silu", "local": "dw5", "table": False, "mlp_conv": True}
    spec = {"kind": "pola", "preset": "paper", "options": {"alpha": 3.25}, "dress": dress}
    long = build(image=spec, text={**spec, "layers": [0, 1]})
    build(image=spec, text={**spec, "layers": [0, 1]}).load_state_dict(long.state_dict())
    with pytest.raises(UserError, match="sha256"):
        build(image=spec, text={**spec, "layers": [1]}).load_state_dict(long.state_dict())
    assert b"sha256" in bytes(long.state_dict()[marker.NAME].tolist())


def test_local_dir_and_hub_folders_round_trip(tmp_path, toy_name, monkeypatch):
    name = f"{toy_name}+pola.paper+focused.paper"
    model = clip_linear.create_model(name).eval()
    for p in model.parameters():
        p.data += 0.01 * torch.randn_like(p)
    config = tmp_path / "open_clip_config.json"
    hub = importlib.import_module("open_clip.push_to_hf_hub")
    assert hub.get_model_config is open_clip.get_model_config
    hub.save_config_for_hf(model, config, hub.get_model_config(name))
    save_file(model.state_dict(), tmp_path / "open_clip_model.safetensors")
    images, texts = batch()
    again = open_clip.create_model(f"local-dir:{tmp_path}").eval()
    assert torch.equal(again.encode_image(images), model.encode_image(images))
    assert torch.equal(again.encode_text(texts), model.encode_text(texts))

    def offline(model_id, filename=None, **_):
        return str(tmp_path / (filename or "open_clip_model.safetensors"))

    monkeypatch.setattr(open_clip.factory, "download_pretrained_from_hf", offline)
    downloaded = open_clip.create_model("hf-hub:someone/some-model").eval()
    assert torch.equal(downloaded.encode_text(texts), model.encode_text(texts))


def test_specs_that_do_not_fit():
    for spec, match in (
        ({"kind": "elu", "layers": "0-3"}, "0-2"),
        ({"kind": "elu", "layers": [7]}, "0-2"),
        ({"kind": "elu", "layers": "all-of-them"}, "0-2"),
        ({"kind": "elu", "layer": "all"}, "did you mean 'layers'"),
        ({"kind": "elu", "dress": {"ropes": True}}, "did you mean 'rope'"),
        ({"kind": "elu", "dress": {"local": "dw7"}}, "known: dw5"),
        ({"kind": "elu", "dress": {"gate": "relu"}}, "use one of"),
        ({"kind": "inline", "options": {"kernel": "gelu"}}, "identity"),
        ({"kind": "pola", "options": {"alpha": "four"}}, "alpha"),
        ({"kind": "mala", "options": {"forms": "paper"}}, "did you mean 'form'"),
        ({"kind": "elu", "options": ["a"]}, "dict"),
        ({}, "unknown variant"),
        ("elu.", "unknown preset"),
        (7, "write a variant's name"),
    ):
        with pytest.raises(UserError, match=match):
            build(image=spec)


def test_a_refused_swap_leaves_the_model_alone():
    model = build()
    before = copy.deepcopy(model.state_dict())
    odd = {**VISION, "width": 30, "head_width": 10}
    with pytest.raises(UserError, match="multiple of 4"):
        build({**TOY, "vision_cfg": odd}, image="mala.paper")
    with pytest.raises(UserError, match="layers"):
        clip_linear.swap_attention(model, image={"kind": "elu", "layers": [9]})
    assert list(model.state_dict()) == list(before) and not hasattr(model, "_linear_attn_specs")
    clip_linear.swap_attention(model, image="elu")
    with pytest.raises(UserError, match="swapped already"):
        clip_linear.swap_attention(model, image="mala")
    clip_linear.swap_attention(model, text="mala")  # the other tower may follow
    build(image="elu", text="mala").load_state_dict(model.state_dict())
