"""The closed form against models that are really built, and their operators really counted."""

import dataclasses
import json
import subprocess
import sys

import pytest

from clip_linear.errors import UserError
from clip_linear.names import model_config, with_variants
from clip_linear.profile import profile
from clip_linear.registry import declaration, list_variants

VISION = {"image_size": [24, 32], "patch_size": 8, "width": 32, "head_width": 8, "layers": 3}
TEXT = {"width": 24, "heads": 3, "layers": 2, "vocab_size": 64, "context_length": 11}
TOY = {"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT}
SWITCHES = {
    "plain": ({}, {}),
    "options": (
        {"ls_init_value": 0.1, "no_ln_pre": True, "mlp_ratio": 3.5},
        {"no_causal_mask": True, "proj_bias": True, "ls_init_value": 1.0},
    ),
    "no projection": ({}, {"proj_type": "none", "width": 16, "heads": 2}),
    "custom blocks": (
        {"qk_norm": True, "scale_heads": True, "scale_attn": True},
        {"scale_attn_inner": True, "scale_fc": True, "block_type": "custom"},
    ),
}


def _models():
    yield "softmax", TOY, None, None
    for name, (vision, text) in SWITCHES.items():
        config = {**TOY, "vision_cfg": {**VISION, **vision}, "text_cfg": {**TEXT, **text}, "init_logit_bias": -10.0}
        yield name, config, "affine_eq4", "affine_eq4"
    for variant in list_variants():
        for preset in declaration(variant).info.presets:
            image, text = (
                {"kind": variant, "preset": preset} if tower in declaration(variant).info.towers else None
                for tower in ("image", "text")
            )
            yield f"{variant}.{preset}", TOY, image, text
    yield "hybrid", TOY, {"kind": "mala", "preset": "paper", "layers": "0-1"}, {"kind": "elu", "layers": [1]}


@pytest.mark.parametrize(("config", "image", "text"), [pytest.param(*m[1:], id=m[0]) for m in _models()])
def test_equals_the_built_model(config, image, text):
    from clip_linear.measure import measure

    config = with_variants(config, image, text)
    closed, counted = dataclasses.asdict(profile(config)), dataclasses.asdict(measure(config))
    for name, value in counted.items():
        if name.startswith("gmacs"):  # element-wise work has no operator that the counter knows
            assert closed[name] == pytest.approx(value, rel=0.02)
        elif name.startswith("core_share"):
            assert closed[name] == pytest.approx(value, abs=0.03)
        else:
            assert closed[name] == value, name


def test_openclip_sizes():
    """Parameters and GMACs of well-known models, counted once from built models."""
    b16 = profile(model_config("ViT-B-16")[1])
    assert (b16.n_params_vision, b16.n_params_text, b16.n_params_embedding) == (86192640, 63428096, 25296896)
    assert b16.n_params_total == 149620737
    assert (round(b16.gmacs_image, 2), round(b16.gmacs_text, 2)) == (17.56, 2.98)
    assert round(b16.core_share_image * b16.gmacs_image, 2) == 0.72
    linear = profile(model_config("ViT-B-16+elu")[1])
    assert round(linear.core_share_image * linear.gmacs_image, 2) == 0.23


def test_image_size_and_bare_paths(tmp_path):
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(TOY))
    config = model_config(f"{path}+mala.paper")[1]
    small, large = profile(config), profile(config, image_size=64)
    assert large.n_params_vision - small.n_params_vision == (64 - 12) * 32  # the positional embedding alone
    assert large.state_image == small.state_image  # a linear tower's state does not grow
    assert large.gmacs_text == small.gmacs_text < small.gmacs


def test_towers_without_a_closed_form():
    p = profile(model_config("ViT-B-16-SigLIP+mala+elu")[1])
    assert (p.n_params_vision, p.n_params_total) == (92884224, 203155970)
    assert p.core_share_image < 0.02 < profile(model_config("ViT-B-16-SigLIP")[1]).core_share_image
    coca = profile(model_config("coca_ViT-B-32")[1])
    assert coca.n_params_vision + coca.n_params_text < coca.n_params_total - 1  # the decoder belongs to neither


def test_command_and_its_errors():
    def run(*args):
        return subprocess.run([sys.executable, "-m", "clip_linear", "profile", *args], capture_output=True, text=True)

    out = json.loads(run("ViT-S-16+elu", "ViT-S-16", "--json", "--image-size", "448").stdout)
    assert [p["model"] for p in out] == ["ViT-S-16+elu", "ViT-S-16"] and out[0]["gmacs"] < out[1]["gmacs"]
    assert "ViT-S-16  total" in run("ViT-S-16").stdout
    for args in (["ViT-S-17"], ["ViT-S-16+malla"], ["ViT-S-16", "--image-size", "0"]):
        wrong = run(*args)
        assert wrong.returncode == 2 and not wrong.stdout and len(wrong.stderr.splitlines()) == 1, wrong.stderr


def test_profile_needs_no_torch():
    code = (
        "import sys; from clip_linear.profile import profile; from clip_linear.names import model_config;"
        "profile(model_config('ViT-B-16+mala.paper+elu')[1]); print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "False", out.stderr


def test_layers_that_do_not_fit():
    config = with_variants(TOY, {"kind": "elu", "layers": "0-3"})
    with pytest.raises(UserError, match="0-2"):
        profile(config)
