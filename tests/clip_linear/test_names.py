"""Model names and specs, without torch: every mistake is one clear error before anything is built."""

import json
import subprocess
import sys

import pytest

from clip_linear.errors import UserError
from clip_linear.names import model_config, parse_spec, split_name, tower_spec, variant_label, with_variants

TOY = {"embed_dim": 16, "vision_cfg": {"layers": 2}, "text_cfg": {"layers": 2}}


def test_names_and_labels():
    assert split_name("ViT-B-16+mala+elu") == ("ViT-B-16", "mala", "elu")
    assert split_name("ViT-B-16") == ("ViT-B-16", None, None)
    config = with_variants(TOY, "mala.paper")
    assert (variant_label(config, "image"), variant_label(config, "text")) == ("mala.paper", "none")
    assert variant_label(with_variants(TOY, "elu.core"), "image") == "elu"
    assert "linear_attn" not in TOY["vision_cfg"]  # a copy was changed
    for wrong in ("+mala", "ViT-B-16+", "ViT-B-16++elu", "ViT-B-16+a+b+c"):
        with pytest.raises(UserError, match="NAME"):
            split_name(wrong)


def test_specs_are_complete_and_hold_nothing_empty():
    full = {"kind": "mala", "preset": "paper", "dress": {"rope": False}, "layers": "0-1", "options": {"form": "paper"}}
    assert parse_spec(full) == full
    assert parse_spec("mala") == {"kind": "mala", "preset": "core"}
    assert parse_spec({"kind": "mala", "dress": {}, "layers": "all", "options": None}) == parse_spec("mala")
    assert tower_spec(with_variants(TOY, full), "image") == full


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("ViT-B-17", "did you mean 'ViT-B-16'"),
        ("ViT-B-16+rellu", "did you mean 'relu'"),
        ("ViT-B-16+elu.paper", "no published module"),
        ("ViT-B-16+elu.papers", "did you mean 'paper'"),
        ("no/such/file.json", "does not exist"),
    ],
)
def test_mistakes(name, match):
    with pytest.raises(UserError, match=match) as error:
        model_config(name)
    assert "\n" not in str(error.value)


def test_bad_config_files(tmp_path):
    path = tmp_path / "ViT-B-16.json"
    for text, match in (("{", "not valid JSON"), ("[]", "lacks embed_dim"), (json.dumps(TOY), "differs from it")):
        path.write_text(text)
        with pytest.raises(UserError, match=match):
            model_config(str(path))


def test_specs_are_checked_without_torch():
    code = (
        "import sys; from clip_linear.names import parse_spec\n"
        "for s in ('pola.paper', {'kind': 'mala', 'options': {'form': 'paper'}}): parse_spec(s, 'text')\n"
        "print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "False", out.stderr
