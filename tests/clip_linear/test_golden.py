"""Every variant equals its released module: cores, causal and masked forms, and whole modules."""

from pathlib import Path

import numpy as np
import pytest
import torch

from clip_linear.attention import Dress, Site, Tokens, rotate
from clip_linear.convert import load_official
from clip_linear.functional import attention
from clip_linear.local import DepthwiseConv

FOLDER = Path(__file__).parent / "golden"
CORES = {
    "mala_core_norope": ("mala", {}),
    "mala_core_rope": ("mala", {}),
    "rala_core_norope": ("rala", {}),
    "rala_core_rope": ("rala", {}),
    "nala_core_norope": ("nala", {}),
    "nala_core_rope": ("nala", {}),
    "pola_core": ("pola", {}),
    "pola_core_init": ("pola", {}),
    "flatten_core": ("focused", {}),
    "inline_core_identity": ("inline", {"kernel": "identity"}),
    "inline_core_relu": ("inline", {"kernel": "relu"}),
    "inline_core_exp": ("inline", {"kernel": "exp"}),
    "efficientvit_core_timm": ("enhanced", {}),
}
TEXTS = {
    "naive_softmax": ("softmax", {}),
    "naive_affine_eq4_norm": ("affine_eq4", {}),
    "naive_affine_eq4_raw_small": ("affine_eq4", {"normalize_qk": False}),
    "naive_affine_eq7": ("affine_eq7", {}),
    "naive_plain_elu1": ("elu", {}),
    "naive_plain_relu": ("relu", {}),
    "naive_plain_exp": ("exp", {}),
    "naive_hydra": ("hydra", {}),
    "naive_cosformer": ("cosformer", {}),
    "naive_mala_papereq": ("mala", {"form": "paper"}),
    "causal_mala": ("mala", {}),
    "causal_rala": ("rala", {}),
    "causal_inline": ("inline", {}),
    "causal_relu_effvit": ("enhanced", {}),
}
MODULES = {
    "mala_module_7x7": ("mala", {}),
    "rala_module_7x7": ("rala", {}),
    "nala_module_7x7": ("nala", {}),
    "pola_pvt_module_7x7": ("pola", {}),
    "pola_swin_module_7x7": ("pola", {}),
    "flatten_pvt_module_7x7": ("focused", {}),
    "inline_pvt_module_7x7": ("inline", {}),
    "inline_swin_module_7x7_identity": ("inline", {"kernel": "identity"}),
    "inline_swin_module_7x7_relu": ("inline", {"kernel": "relu"}),
    "inline_deit_module_cls_7x7": ("inline", {}),
}


def load(name):
    data = np.load(FOLDER / f"{name}.npz")
    return {k: data[k] for k in data.files}


def close(got, want, tolerance):
    """Largest error relative to the largest value."""
    want = torch.as_tensor(want).double()
    error = (got.detach().double() - want).abs().max() / want.abs().max()
    assert error < tolerance, f"{float(error):.1e} is not below {tolerance}"


def inputs(data, dtype):
    return [torch.from_numpy(data[x]).to(dtype).requires_grad_() for x in "qkv"]


def test_every_file_is_used():
    assert {p.stem for p in FOLDER.glob("*.npz")} == {*CORES, *TEXTS, *MODULES, "proposal_grid_text"}


@pytest.mark.parametrize("name", CORES)
def test_cores(name):
    variant, options = CORES[name]
    data = load(name)
    tensors = {k[6:]: torch.from_numpy(v) for k, v in data.items() if k.startswith("param/")}
    rope = (torch.from_numpy(data["sin"]), torch.from_numpy(data["cos"])) if "sin" in data else None
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
        q, k, v = inputs(data, dtype)
        out = attention(variant, q, k, v, rope=rope, **tensors, **options)
        close(out, data["out_f64"], tolerance)
        out.backward(torch.from_numpy(data["cotangent"]).to(dtype))
        for x, leaf in zip("qkv", (q, k, v)):
            close(leaf.grad, data[f"grad_{x}_f64"], 1e-12 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("name", TEXTS)
def test_causal_and_masked(name):
    variant, options = TEXTS[name]
    data = load(name)
    keep = torch.from_numpy(data["key_mask"])
    rows = keep[:, None, :, None]
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
        for causal, form in ((False, "full"), (True, "causal")):
            q, k, v = inputs(data, dtype)
            out = attention(variant, q, k, v, causal=causal, **options)
            close(out, data[f"out_{form}"], tolerance)
            out.backward(torch.from_numpy(data["cotangent"]).to(dtype))
            for x, leaf in zip("qkv", (q, k, v)):  # the stored gradients are float32
                close(leaf.grad, data[f"grad_{x}_{form}"], 1e-6 if dtype == torch.float64 else 2e-5)
            padded = "keypad" if form == "full" else "causal_keypad"
            masked = attention(variant, q, k, v, causal=causal, key_mask=keep, **options)
            close(masked * rows, torch.from_numpy(data[f"out_{padded}"]) * rows, tolerance)


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    variant, options = MODULES[name]
    data = load(name)
    state = {k[6:]: torch.from_numpy(v) for k, v in data.items() if k.startswith("param/")}
    grid = tuple(int(n) for n in data["HW"])

    def tokens(key, dtype):
        x = torch.from_numpy(data[key]).to(dtype)
        return x.flatten(2).mT.contiguous() if x.ndim == 4 else x

    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
        module = load_official(variant, state, int(data["heads"]), **options).to(dtype)
        x = tokens("x", dtype).requires_grad_()
        out = module(x, grid=grid, num_prefix_tokens=x.shape[1] - grid[0] * grid[1])
        close(out, tokens("out_f64", torch.float64), tolerance)
        out.backward(tokens("cotangent", dtype))
        close(x.grad, tokens("grad_x_f64", torch.float64), 1e-12 if dtype == torch.float64 else 2e-5)
        unused = [n for n, p in module.named_parameters() if p.grad is None]
        assert not unused


def test_rotary_tables_are_the_released_ones():
    for name in ("mala_module_7x7", "rala_module_7x7", "nala_module_7x7"):
        data = load(name)
        sin, cos = Tokens(grid=(7, 7)).rope(16, 49, torch.device("cpu"))
        assert np.array_equal(sin, data["sin"]) and np.array_equal(cos, data["cos"])


def test_grid_operations_after_patch_dropout():
    data = load("proposal_grid_text")
    t = {k: torch.from_numpy(v) for k, v in data.items()}
    v, index, grid = t["v"].double(), t["idx"], tuple(int(n) for n in data["HW"])
    tokens = Tokens(grid=grid, prefix=1, index=index)
    conv = DepthwiseConv(Site(width=48, num_heads=3, grid=grid, prefix=1), 48, 5)
    conv.weight.data, conv.bias.data = t["w"].double(), t["bias"].double()
    close(conv.convolve(v, tokens), t["out_gridconv_drop"], 1e-12)
    q, k = t["q"].double(), t["k"].double()
    # The tables are made in float32, in which the released code makes them; the golden ones in float64.
    rope = tokens.rope(16, 25, q.device)
    close(rotate(q, rope), t["out_rope_drop"], 1e-7)
    heads = v.unflatten(-1, (3, 16)).transpose(1, 2)
    close(attention("mala", q, k, heads, rope=rope), t["out_mala_rope_cls_drop"], 1e-6)
    causal = DepthwiseConv(Site(width=48, num_heads=3), 48, 5)
    causal.weight.data, causal.bias.data = t["w1"].double(), t["bias"].double()
    close(causal.convolve(t["vt"].double(), Tokens(causal=True)), t["out_causal_conv1d"], 1e-12)


def test_dress_of_presets():
    """What the released modules wear; a core preset wears only what its equation contains."""
    from clip_linear.registry import declaration

    assert declaration("mala").paper == declaration("rala").paper == Dress(rope=True, local="dw5", gate="linear")
    assert declaration("nala").paper == Dress(rope=True, local="dw5", norm=True, gate="silu")
    assert declaration("mala").core == declaration("nala").core == declaration("inline").core == Dress()
    assert declaration("rala").core == declaration("pola").core == Dress(gate="linear")
