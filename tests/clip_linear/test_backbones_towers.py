"""The backbones as towers: in timm, in OpenCLIP, at other image sizes, with other variants, in low precision."""

import copy
import json

import open_clip
import pytest
import timm
import torch
from open_clip.factory import get_model_config

import clip_linear
from clip_linear.backbones import from_official, register
from clip_linear.backbones.flags import expand_flags
from clip_linear.backbones.sizes import SIZES, clip_configs, timm_names
from clip_linear.backbones.zoo import build
from clip_linear.errors import UserError
from clip_linear.names import known_models, model_config, with_variants
from clip_linear.openclip import add_config
from clip_linear.registry import declaration, list_variants
from tests.clip_linear.backbone_helpers import PIXELS, TOYS, clip_config

HIERARCHIES = [t for t in TOYS if "pvt" not in t and "swin" not in t and "deit" not in t]


@pytest.fixture(autouse=True, scope="module")
def _registered():
    clip_linear.register()
    clip_linear.register()  # again: nothing happens


def images(n=2, height=PIXELS, width=None):
    return torch.randn(n, 3, height, width or height, generator=torch.Generator().manual_seed(0))


def clip(toy, image=None, text=None, **vision):
    """A tiny CLIP with this tower, built by OpenCLIP."""
    config = with_variants(clip_config(toy, **vision), image, text)
    name = f"{toy}-{abs(hash(json.dumps(config, sort_keys=True)))}"
    add_config(name, config)
    return open_clip.create_model(name)


@pytest.mark.parametrize("toy", TOYS)
def test_timm_interface(toy):
    model = timm.create_model(toy, num_classes=7, drop_path_rate=0.1).eval()
    x = images()
    assert model(x).shape == (2, 7)
    pooled = model.forward_head(model.forward_features(x), pre_logits=True)
    assert pooled.shape == (2, model.num_features)
    strides = [16] * 3 if "deit" in toy else [4, 8, 16, 32]
    final, maps = model.forward_intermediates(x)
    assert [PIXELS // m.shape[-1] for m in maps] == strides == [f["reduction"] for f in model.feature_info]
    assert [m.shape[1] for m in maps] == [f["num_chs"] for f in model.feature_info]
    assert torch.equal(final, model.forward_features(x))
    (last,) = model.forward_intermediates(x, indices=1, intermediates_only=True)
    assert torch.equal(last, maps[-1])
    model.reset_classifier(0)
    assert torch.equal(model(x), pooled)
    net = timm.create_model(toy, features_only=True, out_indices=(0, 2)).eval()
    assert [m.shape for m in net(x)] == [maps[0].shape, maps[2].shape]
    assert net.feature_info.channels() == [maps[0].shape[1], maps[2].shape[1]]
    with pytest.raises(UserError, match="no weights"):
        timm.create_model(toy, pretrained=True)
    assert model.default_cfg["mean"] == (0.485, 0.456, 0.406)


@pytest.mark.parametrize("toy", TOYS)
def test_locking_leaves_the_last_groups(toy):
    model = clip(toy)
    model.lock_image_tower(unlocked_groups=2, freeze_bn_stats=True)
    free = {n for n, p in model.visual.trunk.named_parameters() if p.requires_grad}
    assert free and not any(n.startswith(("patch_embed", "layers.0.")) for n in free)


def test_every_size_is_known_to_timm_and_openclip():
    configs = {n: c for n, c in clip_configs().items() if not n.startswith("toy")}
    assert len(configs) == 57 and all(timm.is_model(n) for n in timm_names())
    assert set(configs) <= set(open_clip.list_models()) & set(known_models())
    for name, config in configs.items():
        assert model_config(name) == (name, config) == (name, get_model_config(name))
    text = model_config("MAViT-S-CLIP+inline+elu")[1]
    assert text["vision_cfg"]["linear_attn"]["kind"] == "inline" and text["text_cfg"]["linear_attn"]["kind"] == "elu"
    with pytest.raises(UserError, match="MAViT-S-CLIP"):
        model_config("MAViT-S-CLIPP")


def test_closed_form_costs():
    """What the list prints equals what is built and counted (test_backbones_golden compares that with the papers')."""
    from clip_linear.backbones.cost import cost
    from tests.clip_linear.test_backbones_golden import MEASURED, measured_key

    for name in timm_names():
        if not name.startswith("toy"):
            want, found = MEASURED[measured_key(name)], cost(name)
            unused = 1024 if measured_key(name).startswith(("Pola-PVT", "FLatten-PVT")) else 0
            assert found.parameters == want["params"] - unused
            assert found.macs / 1e9 == pytest.approx(want["macs_G"], rel=1e-3)


@pytest.mark.parametrize("toy", TOYS)
def test_linear_names_have_no_softmax(toy):
    kinds = build(f"{toy}_linear" if not SIZES[toy].all_linear else toy).block_variants()
    assert "softmax" not in kinds
    assert ("softmax" in build(toy).block_variants()) == (not SIZES[toy].all_linear)


def test_flags():
    assert expand_flags("lv", (1, 2), "mala") == [["mala"], ["softmax", "softmax"]]
    assert expand_flags([["l", "elu"], "inline"], (2, 1), "mala") == [["mala", "elu"], ["inline"]]
    for wrong, words in (("lll", "3 stages"), (["l", ["l"]], "1 blocks"), (["l", "mela"], "mela")):
        with pytest.raises(UserError, match=words):
            expand_flags(wrong, (1, 2), "mala")
    with pytest.raises(UserError, match="embed_dimm"):
        build("mavit_tiny", embed_dimm=3)
    with pytest.raises(UserError, match="mavit_tiny"):
        build("mavit_tinny")
    with pytest.raises(UserError, match="mavit"):
        from_official("mavitt", {})


@pytest.mark.parametrize("toy", TOYS)
def test_other_image_sizes(toy):
    """OpenCLIP hands an image size to the tower; what cannot work says so."""
    windowed = "swin" in toy
    size = [64, 128] if windowed else [96, 80]
    model = clip(toy, image_size=size).eval()
    assert model.visual.trunk.img_size == tuple(size)
    assert model.encode_image(images(2, *size)).shape == (2, 16)
    assert model.visual.trunk.default_cfg["input_size"] == (3, *size)
    if windowed:
        with pytest.raises(UserError, match="not a multiple"):
            clip(toy, image_size=[64, 72])
        with pytest.raises(UserError, match="64×64"):
            clip(toy).encode_image(images(1, 96))


@pytest.mark.parametrize("toy", [t for t in TOYS if "swin" in t])
def test_another_size_and_back_keeps_all_weights(toy):
    model = build(toy).eval()
    x, shapes = images(), {n: p.shape for n, p in model.named_parameters()}
    before = model(x)
    model.set_input_size(128, window_size=16)
    assert model(images(1, 128)).shape == (1, 1000)
    model.set_input_size(PIXELS)
    assert {n: p.shape for n, p in model.named_parameters()} == shapes
    close = [n for n in shapes if not n.endswith(("body.table", "bias_table"))]
    fresh = dict(build(toy).named_parameters())
    assert len(close) < len(fresh)
    assert torch.allclose(model(x), before, atol=0.5)


@pytest.mark.parametrize("toy", [t for t in TOYS if "pvt" in t or "deit" in t])
def test_images_that_are_too_small(toy):
    with pytest.raises(UserError, match="8×70 are too small"):
        build(toy)(images(1, 8, 70))
    if "pvt" in toy:
        with pytest.raises(UserError, match="16"):
            build(toy, img_size=16)


def test_windows_grow_with_the_image():
    """Linear blocks that see the whole grid still do at 256 and 384 px; softmax windows are the published 7 and 12."""
    for pixels, name in ((256, "flatten_swin_tiny_linear"), (384, "flatten_swin_tiny"), (448, "flatten_swin_tiny")):
        with torch.device("meta"):
            model = build(name)
            model.set_input_size(pixels)
            model(torch.empty(1, 3, pixels, pixels))
        assert [b.window for b in model.blocks()[:4]] == [pixels // 4] * 2 + [pixels // 8] * 2
        if pixels > 256:
            assert {b.window for b in model.blocks()[4:]} == ({12} if pixels == 384 else {7})
    with torch.device("meta"), pytest.raises(UserError, match="320×320"):
        build("flatten_swin_tiny").set_input_size(320)


@pytest.mark.parametrize("variant", list_variants())
@pytest.mark.parametrize("toy", ["toy_mavit", "toy_nalaformer", "toy_pola_pvt", "toy_inline_swin", "toy_inline_deit"])
def test_any_variant_in_any_skeleton(toy, variant):
    if "image" not in declaration(variant).info.towers:
        pytest.skip(f"{variant} has no form for images")
    model = clip(toy, image=variant, text=variant if "text" in declaration(variant).info.towers else None)
    trunk = model.visual.trunk
    plain = build(toy)
    assert trunk.block_variants() == [variant if k != "softmax" else k for k in plain.block_variants()]
    body, old = trunk.blocks()[0].attn.body, plain.blocks()[0].attn.body
    assert body.dress == old.dress  # the skeleton's
    out = model.encode_image(images())
    assert torch.isfinite(out).all()
    out.square().sum().backward()
    for name, p in trunk.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all(), name


def test_swaps_say_what_they_do():
    paper = clip("toy_pola_pvt", image="mala.paper").visual.trunk.blocks()[0].attn.body
    assert paper.dress == declaration("mala").paper
    some = clip("toy_mavit", image={"kind": "elu", "layers": [0, 4], "dress": {"rope": False}}).visual.trunk
    assert some.block_variants() == ["elu", "mala", "softmax", "softmax", "elu"]
    assert not some.blocks()[0].attn.body.dress.rope and some.blocks()[1].attn.body.dress.rope
    with pytest.raises(UserError, match="linear-CLIP"):
        clip("toy_pola_swin", image={"kind": "elu", "layers": [4]})
    with pytest.raises(UserError, match="multiple"):
        build("toy_mavit", embed_dims=(18, 16, 32, 32))
    control = clip("toy_mavit", image="softmax")
    state = control.state_dict()
    with pytest.raises(UserError, match="mala"):
        clip("toy_mavit").load_state_dict(state)


@pytest.mark.parametrize("toy", HIERARCHIES)
def test_weights_do_not_load_into_other_flags(toy):
    """Names and shapes of an all-linear and a released model are the same."""
    released, linear = build(toy), build(f"{toy}_linear")
    assert released.state_dict().keys() == linear.state_dict().keys()
    with pytest.raises(UserError, match="softmax"):
        linear.load_state_dict(released.state_dict())
    other = build(toy)
    other.load_state_dict(released.state_dict())
    assert torch.equal(other.eval()(images()), released.eval()(images()))
    bare = {k: v for k, v in released.state_dict().items() if k != "clip_linear_blocks"}
    other.load_state_dict(bare)


@pytest.mark.parametrize("toy", HIERARCHIES)
def test_rotary_angles_stay_float32(toy):
    """A bf16 table of 56 positions would be wrong by up to 0.125."""
    model = build(toy).to(torch.bfloat16).eval()
    seen = []
    body = model.blocks()[0].attn.body
    whole = body.variant.attend
    body.variant.attend = lambda q, k, v, tokens, rope=None: seen.append(rope) or whole(q, k, v, tokens, rope)
    out = model(images(1, 224).to(torch.bfloat16))
    assert out.dtype == torch.bfloat16 and torch.isfinite(out).all()
    (sin, cos), D = seen[0], body.site.head_dim
    assert sin.dtype == cos.dtype == torch.float32 and sin.shape == (56 * 56, D)
    freq = 1 / 10000 ** torch.linspace(0, 1, D // 4).double().repeat_interleave(2)
    exact = (torch.arange(56).double()[:, None] * freq).sin()
    assert (sin.view(56, 56, D)[:, 0, : D // 2] - exact).abs().max() < 1e-5
    assert not any("angle" in name for name, _ in model.named_buffers())


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("precision", ["bf16", "fp16 autocast", "bf16 autocast"])
def test_low_precision_stays_finite_with_large_weights(toy, precision):
    """Query, key and value weights eight times as large: the released PolaFormer overflows in fp16 here."""
    torch.manual_seed(0)
    model = build(toy).eval()
    with torch.no_grad():
        for block in model.blocks():
            block.attn.qkv.weight *= 8
    x = images()
    dtype = torch.float16 if precision.startswith("fp16") else torch.bfloat16
    if precision == "bf16":
        model, x = model.to(dtype), x.to(dtype)
        out = model(x)
    else:
        with torch.autocast("cpu", dtype):
            out = model(x)
    assert torch.isfinite(out).all()
    out.float().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("toy", TOYS)
def test_tables_powers_and_scales_are_not_decayed(toy):
    from clip_linear.train.build import _is_gain_or_bias

    model = build(toy)
    learned = ("gamma_1", "gamma_2", "power", "scale", "table", "pos_embed", "cls_token", "bias_table")
    named = [(n, p) for n, p in model.named_parameters() if n.rpartition(".")[2] in learned]
    assert named
    for name, p in model.named_parameters():
        free = p.ndim < 2
        assert free == (name in model.no_weight_decay()) and (not free or _is_gain_or_bias(name, p))
    assert all(p.ndim == 1 for _, p in named)


@pytest.mark.parametrize("toy", TOYS)
def test_checkpointing_changes_nothing(toy):
    model = build(toy)
    other = copy.deepcopy(model)
    other.set_grad_checkpointing()
    for m in (model, other):
        m.train()(images()).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), other.parameters()):
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-6), name
    for (name, a), b in zip(model.named_buffers(), other.buffers()):
        assert torch.equal(a, b), name


def test_importing_sizes_and_resolving_names_needs_no_torch():
    import subprocess
    import sys

    code = (
        "import sys; from clip_linear.names import model_config; model_config('MAViT-S-CLIP+inline');"
        "from clip_linear.__main__ import main; main(['list', 'backbones', 'mavit_t']); print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.splitlines()[-1] == "False", out.stderr
    assert "stages 3–4 (8 of 12 blocks)" in out.stdout and "MAViT-T-linear-CLIP" in out.stdout


def test_registering_is_cheap_and_safe_to_repeat():
    before = len(timm.list_models())
    register()
    assert len(timm.list_models()) == before


def test_profile_equals_the_list_and_works_at_32_px():
    from clip_linear.backbones.cost import cost
    from clip_linear.profile import profile

    config = clip_config("toy_mavit")
    found, listed = profile(config), cost("toy_mavit", classes=1)
    head = 16 * 24  # TimmModel's projection
    assert found.n_params_vision == listed.tower + head
    assert found.gmacs_image * 1e9 == pytest.approx(listed.macs - 24 + head, rel=1e-3)
    small = profile(config, image_size=32)
    assert small.gmacs_image < found.gmacs_image / 3 and small.n_params_vision == found.n_params_vision
    assert small.state_image < found.state_image  # that of the softmax stages


@pytest.mark.parametrize("toy", ["toy_nalaformer", "toy_inline_swin"])
def test_compiles_as_one_graph(toy):
    model = build(toy).eval()
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(whole(images()), model(images()), atol=1e-5)
