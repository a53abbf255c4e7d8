"""``clip-linear convert softmax``: a softmax checkpoint becomes a folder that OpenCLIP loads."""

import json

import open_clip
import torch

from clip_linear.__main__ import main
from clip_linear.openclip import register
from tests.clip_linear.swap_helpers import TOY, build


def write(tmp_path, name):
    config, weights = tmp_path / f"{name}.json", tmp_path / "softmax.pt"
    config.write_text(json.dumps(TOY))
    torch.save(build(seed=3).state_dict(), weights)
    return config, weights


def test_folder_holds_the_weights_and_loads(tmp_path, capsys):
    config, weights = write(tmp_path, "ViT-toy-convert")
    out = tmp_path / "out"
    args = ["convert", "softmax", "--model", f"{config}+pola.paper+elu", "--pretrained", str(weights)]
    assert main([*args, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] > 0
    register()
    model = open_clip.create_model(f"local-dir:{out}")
    own = model.state_dict()
    assert all(torch.equal(own[n], v) for n, v in build(seed=3).state_dict().items())
    assert model.visual.transformer.resblocks[0].attn.body.variant.info.name == "pola"
    assert main([*args, "--out", str(out)]) == 2  # not empty any more
    assert "not empty" in capsys.readouterr().err


def test_wrong_weights_are_one_line(tmp_path, capsys):
    config, weights = write(tmp_path, "ViT-toy-convert-wrong")
    args = ["convert", "softmax", "--model", f"{config}+elu", "--out", str(tmp_path / "out"), "--pretrained"]
    torch.save({"something": torch.zeros(1)}, weights)
    for wrong in (str(weights), "no_such_tag"):
        assert main([*args, wrong]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("clip-linear convert:") and "Traceback" not in captured.err
    assert not (tmp_path / "out").exists()
