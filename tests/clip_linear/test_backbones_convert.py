"""``clip-linear convert official``: released files, wrapped in all the ways they are published."""

import argparse
import collections
import json

import pytest
import timm
import torch

import clip_linear
from clip_linear.__main__ import main
from clip_linear.backbones import sizes
from clip_linear.backbones.sizes import Size
from tests.clip_linear.test_backbones_golden import load

_GOLDEN = {"mavit_released": "mavit_tiny", "flatten_swin_LLSS_64x64": "flatten_swin_tiny"}


class Opaque:
    """An object that the weights-only unpickler does not know."""


@pytest.fixture(params=_GOLDEN)
def released(request, monkeypatch):
    """(registered name, released state dict, golden data) of a reduced released model."""
    from clip_linear.backbones import from_official, register
    from tests.clip_linear.test_backbones_golden import family_of

    data = load(request.param)
    args = json.loads(str(data["args_json"]))
    name, like = f"golden_{request.param.split('_')[0]}", sizes.SIZES[_GOLDEN[request.param]]
    ours = {k: v for k, v in args.items() if k in ("embed_dim", "embed_dims", "depths", "num_heads", "mlp_ratios")}
    ours |= {"projection": args["projection"], "layer_scale": (1,) * 4} if like.skeleton == "hierarchy" else {}
    ours |= {"mlp_ratio": args["mlp_ratio"]} if "mlp_ratio" in args else {}
    assert from_official(family_of(request.param), args)
    size = Size(
        name=name, label=name, skeleton=like.skeleton, paper="", pooled=0, softmax_blocks=like.softmax_blocks,
        img_size=64, args={**like.args, **ours},
    )  # fmt: skip
    monkeypatch.setitem(sizes.SIZES, name, size)
    register()
    state = {k.partition("/")[2]: v for k, v in data.items() if k.startswith(("param/", "buffer/"))}
    return name, {k: v.float() if v.is_floating_point() else v for k, v in state.items()}, data


def run(*args):
    return main(["convert", "official", *map(str, args)])


def logits(name, path, data, **kwargs):
    clip_linear.register()
    classes = len(data["logits_f64/64x64"][0])
    model = timm.create_model(name, num_classes=classes, checkpoint_path=str(path), **kwargs).eval()
    with torch.no_grad():
        return model(data["x/64x64"].float()).double()


def wrong(capsys, *args):
    assert run(*args) == 2
    out = capsys.readouterr()
    assert not out.out and len(out.err.strip().splitlines()) == 1, out.err
    return out.err


WRAPPINGS = {
    "bare": lambda s: s,
    "model": lambda s: {"model": s, "epoch": 3, "optimizer": {}},
    "namespace": lambda s: {"model": s, "args": argparse.Namespace(lr=1e-3, data="/x"), "scaler": {}},
    "ordered, parallel": lambda s: {"state_dict": collections.OrderedDict((f"module.{k}", v) for k, v in s.items())},
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_released_files(tmp_path, capsys, released, wrapping):
    name, state, data = released
    torch.save(WRAPPINGS[wrapping](state), tmp_path / "released.pth")
    flags = "llvv" if "mavit" in name else "LLSS"
    assert run(tmp_path / "released.pth", "--arch", name, "--flags", flags, "--out", tmp_path / "o.pt", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["flags"] == flags and "softmax" in said["blocks"]
    want = data["logits_f64/64x64"]
    assert ((logits(name, tmp_path / "o.pt", data) - want).abs().max() / want.abs().max()) < 2e-5
    written = torch.load(tmp_path / "o.pt", weights_only=True)
    assert written["arch"] == name and written["flags"] == flags and len(written["source_sha256"]) == 64


def test_averaged_weights_and_heads(tmp_path, capsys, released):
    name, state, data = released
    flags = "llvv" if "mavit" in name else "llss"
    headless = {k: v for k, v in state.items() if not k.startswith("head.")}
    torch.save({"model": {k: v * 0 for k, v in state.items()}, "model_ema": headless}, tmp_path / "r.pth")
    args = (tmp_path / "r.pth", "--arch", name, "--flags", flags, "--out", tmp_path / "o.pt")
    assert run(*args, "--ema") == 0 and "0 classes" in capsys.readouterr().out
    model = timm.create_model(name, num_classes=0, checkpoint_path=str(tmp_path / "o.pt")).eval()
    want = data["features_f64/64x64"]
    assert ((model(data["x/64x64"].float()) - want).abs().max() / want.abs().max()) < 2e-5
    torch.save({"model": state}, tmp_path / "r.pth")
    assert "no averaged weights" in wrong(capsys, *args, "--ema")


def test_flags_are_asked_for_and_kept(tmp_path, capsys, released):
    name, state, data = released
    torch.save(state, tmp_path / "r.pth")
    args = (tmp_path / "r.pth", "--arch", name, "--out", tmp_path / "o.pt")
    if "flatten" in name:  # its keys tell
        assert run(*args) == 0
        capsys.readouterr()
        assert "do not fit" in wrong(capsys, *args, "--flags", "llll")
        return
    assert "--flags llvv" in wrong(capsys, *args)
    assert run(*args, "--flags", "llll") == 0
    assert "softmax in 0 of 6" in capsys.readouterr().out
    with pytest.raises(ValueError, match="blocks are"):  # a model with softmax does not take the all-linear file
        logits(name, tmp_path / "o.pt", data)
    for flags in ("lvv", "llxx", "llMS", "llvv3"):
        assert flags in wrong(capsys, *args, "--flags", flags)


def test_other_image_sizes(tmp_path, released):
    name, state, _ = released
    torch.save(state, tmp_path / "r.pth")
    flags = "llvv" if "mavit" in name else "llss"
    assert (
        run(tmp_path / "r.pth", "--arch", name, "--flags", flags, "--image-size", 128, "--out", tmp_path / "o.pt") == 0
    )
    assert torch.load(tmp_path / "o.pt", weights_only=True)["image_size"] == [128, 128]


def test_files_that_cannot_be_read(tmp_path, capsys, released):
    name, state, _ = released
    path = tmp_path / "r.pth"
    args = (path, "--arch", name, "--flags", "llvv", "--out", tmp_path / "o.pt")
    assert "does not exist" in wrong(capsys, *args)
    path.write_bytes(b"<html>not a checkpoint</html>")
    assert "download" in wrong(capsys, *args)
    torch.save({"model": state, "config": Opaque()}, path)
    said = wrong(capsys, *args)
    assert "--allow-pickle" in said and "Opaque" in said
    assert run(*args, "--allow-pickle") == 0
    assert "warning" in capsys.readouterr().err
    torch.save({"epoch": 3}, path)
    assert "no weights" in wrong(capsys, *args)
    torch.save([1, 2], path)
    assert "list" in wrong(capsys, *args)
    torch.save({"model": {k: v for k, v in state.items() if "layers.1" not in k}}, path)
    assert "missing" in wrong(capsys, *args)
    torch.save(state, path)
    assert "mavit" in wrong(capsys, path, "--arch", "mavitt_small")
    assert "itself" in wrong(capsys, path, "--arch", name, "--flags", "llvv", "--out", path)
    assert "nowhere" in wrong(capsys, path, "--arch", name, "--flags", "llvv", "--out", tmp_path / "nowhere" / "o.pt")
