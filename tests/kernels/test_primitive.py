"""The primitive's backends agree with the O(N²) float64 reference in outputs and gradients."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from clip_linear_kernels import (
    diagonal_attention,
    linear_attention,
    linear_attention_qkvpacked,
    linear_attention_reference,
    plain,
    set_backend,
)
from clip_linear_kernels.reference import diagonal_attention_reference
from clip_linear_kernels.spec import FEATURES, NORMALISERS
from clip_linear_kernels.testing import MODES, Case, cases, errors


@pytest.fixture(autouse=True)
def _restore():
    yield
    set_backend(None)


def traced(q, k, v, q_den=None, k_den=None, weights=None, key_mask=None, eps=1e-6, **form):
    """The form that torch.compile traces, run eagerly."""
    w = weights
    if key_mask is not None:
        w = key_mask[:, None].to(v.dtype) * (1 if w is None else w)
    form = [form[name] for name in ("feature", "normaliser", "causal", "scale")]
    return plain.forward(q, k, v, q_den, k_den, w, eps, *form)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", ["eager", "traced"])
def test_float64_to_rounding(form, causal):
    set_backend("eager")
    function = linear_attention if form == "eager" else traced
    lengths = (1, 2, 31, 33, 197) if form == "eager" else (1, 33, 197)
    for case in cases(Case(dtype=torch.float64), lengths):
        if case.causal == causal:
            worst = errors(function, case)
            assert max(worst.values()) < 1e-11, (case, worst)


def test_float32():
    set_backend("eager")
    for case in cases(Case(), (1, 33, 197)):
        worst = errors(linear_attention, case)
        assert max(worst.values()) < 1e-5, (case, worst)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_inputs_are_computed_in_float32(dtype, autocast):
    for normaliser, feature in MODES:
        for causal in (False, True):
            case = Case(normaliser=normaliser, feature=feature, causal=causal, dtype=dtype, length=150)
            t, other, _ = case.tensors()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = linear_attention(**t, **other)
            assert out.dtype == dtype
            expected = linear_attention_reference(**{n: x.double() for n, x in t.items()}, **other)
            # Half an ulp of the output, at its largest value, is all that may be lost.
            assert (out.double() - expected).abs().max() <= expected.abs().max() * torch.finfo(dtype).eps * 0.51


@pytest.mark.parametrize(("normaliser", "feature"), MODES)
@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(feature, normaliser, causal):
    set_backend("eager")
    case = Case(feature=feature, normaliser=normaliser, causal=causal, dtype=torch.float64)
    case = replace(case, batch=1, heads=2, length=5, width=4, value_width=3, weights=True, den=True)
    t, other, _ = case.tensors()
    leaves = [x.requires_grad_() for x in t.values()]
    assert torch.autograd.gradcheck(lambda *args: linear_attention(**dict(zip(t, args)), **other), leaves)


def test_packed_equals_separate_and_its_gradient_is_packed():
    case = Case(packed=True, mask=True, normaliser="mala", feature="elu1")
    t, other, cotangent = case.tensors()
    qkv = torch.stack([t["q"], t["k"], t["v"]]).permute(1, 3, 0, 2, 4).contiguous().requires_grad_()
    separate = linear_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0), **other)
    (want,) = torch.autograd.grad(separate, qkv, cotangent)
    packed = linear_attention_qkvpacked(qkv, **other)
    (got,) = torch.autograd.grad(packed, qkv, cotangent)
    assert torch.equal(packed, separate)
    assert torch.equal(got, want)
    assert got.is_contiguous()


@pytest.mark.parametrize("causal", [False, True])
def test_diagonal(causal):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 37, 4, generator=g, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(2, 37, generator=g) > 0.3
    got = diagonal_attention(q, k, v, causal=causal, key_mask=mask)
    want = diagonal_attention_reference(q, k, v, causal=causal, key_mask=mask)
    assert (got - want).abs().max() < 1e-13
    assert diagonal_attention(q.bfloat16(), k.bfloat16(), v.bfloat16()).dtype == torch.bfloat16


def test_rows_without_keys_are_finite():
    mask = torch.zeros(1, 9, dtype=torch.bool)
    for normaliser in NORMALISERS:
        for feature in FEATURES:
            for causal in (False, True):
                q, k, v = (torch.randn(1, 2, 9, 4, requires_grad=True) for _ in range(3))
                kw = {"normaliser": normaliser, "feature": feature, "causal": causal, "key_mask": mask}
                out = linear_attention(q, k, v, **kw)
                out.sum().backward()
                assert out.isfinite().all(), (normaliser, feature)
                assert all(x.grad.isfinite().all() for x in (q, k, v)), (normaliser, feature)


def test_output_merges_heads_without_a_copy():
    q = torch.randn(2, 3, 10, 4)
    for causal in (False, True):
        out = linear_attention(q, q, q, feature="elu1", causal=causal)
        assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"feature": "elu"}, "elu1"),
        ({"normaliser": "avg"}, "mean"),
        ({"k": torch.ones(1, 2, 7, 8)}, "do not fit"),
        ({"causal": True, "k": torch.ones(1, 2, 7, 4), "v": torch.ones(1, 2, 7, 4)}, "as many keys"),
        ({"q_den": torch.ones(1, 2, 6, 3)}, "q_den"),
        ({"eps": torch.ones(1, 1, 1, 1, requires_grad=True)}, "detach"),
    ],
)
def test_wrong_calls_say_what_is_wrong(change, words):
    good = {name: torch.ones(1, 2, 6, 4) for name in "qkv"}
    with pytest.raises(ValueError, match=words):
        linear_attention(**(good | change))


def test_unknown_backend():
    with pytest.raises(ValueError, match="eager"):
        set_backend("fast")


_PEAK = """
import sys, torch
from clip_linear_kernels import linear_attention
width, causal, den = int(sys.argv[1]), sys.argv[2] == "1", sys.argv[3] == "1"
x = [torch.randn(1, 6, 16384, w).requires_grad_() for w in (width, width, 64)]
more = {"q_den": x[0].detach() + 1, "k_den": x[1].detach() + 1} if den else {}
linear_attention(*(t[:, :1, :256] for t in x), causal=causal).sum().backward()
for t in x: t.grad = None
def peak():  # not getrusage: its maximum survives exec, so that it could be that of the process that started this one
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
before = peak()
linear_attention(*x, causal=causal, feature="elu1", normaliser="mala", **more).sum().backward()
print((peak() - before) / 1024)
"""


@pytest.mark.parametrize(
    ("width", "causal"),
    [("128", "1"), *(pytest.param(*x, marks=pytest.mark.slow) for x in (("64", "1"), ("128", "0")))],
)
def test_peak_memory_of_a_long_sequence(width, causal):
    run = subprocess.run([sys.executable, "-c", _PEAK, width, causal, "1"], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 600  # MiB beyond the inputs; gradients and output alone are 96 to 144
