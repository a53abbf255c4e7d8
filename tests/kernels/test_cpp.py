"""The C++ kernel: every instruction set against the reference, threads, strides, and everything that can go wrong."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clip_linear_kernels import linear_attention, set_backend
from clip_linear_kernels.call import Form, Inputs
from clip_linear_kernels.cpu import build, launch
from clip_linear_kernels.dispatch import choose
from clip_linear_kernels.testing import Case, cases, errors

needs_kernel = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler; install g++")


@pytest.fixture(autouse=True)
def _restore(monkeypatch):
    monkeypatch.setattr(launch, "isa", 0)
    set_backend("cpp")
    yield
    set_backend(None)


def _served(case):
    t, other, _ = case.tensors()
    x = Inputs(t["q"], t["k"], t["v"])
    return choose(x, Form(other["feature"], other["normaliser"], case.causal, 1.0, 0.0))[0]


@needs_kernel
@pytest.mark.parametrize("isa", [1, 2, 3])
def test_agrees_with_the_reference(isa, monkeypatch):
    monkeypatch.setattr(launch, "isa", isa)
    lengths = (1, 2, 63, 64, 65, 197) if isa == 3 else (1, 65)
    for case in cases(Case(), lengths):
        if case.feature == "focused3" or (case.normaliser, case.feature) == ("affine", "identity"):
            continue  # no kernel; 1 + q·k without norms crosses zero
        assert _served(case) == "cpp"
        worst = errors(linear_attention, case)
        assert max(worst.values()) < 1e-5, (case, worst)


@needs_kernel
@pytest.mark.parametrize("width", [8, 16, 24, 72, 80, 128, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_head_widths(width, causal):
    for value_width in (width, 40):
        case = Case(width=width, value_width=value_width, length=70, causal=causal, den=True, mask=True, weights=True)
        worst = errors(linear_attention, case)
        assert max(worst.values()) < 1e-5, (case, worst)


@needs_kernel
def test_bfloat16_rounds_once():
    for causal in (False, True):
        case = Case(normaliser="mala", length=150, dtype=torch.bfloat16, causal=causal, packed=True)
        assert _served(case) == "cpp"
        worst = errors(linear_attention, case)
        assert max(worst.values()) < 4.1e-3, worst  # half an ulp of the largest value


@needs_kernel
def test_mixed_dtypes_are_computed_in_the_widest(monkeypatch):
    # Rotary embeddings leave float32 q and k beside bfloat16 values.
    seen = []
    monkeypatch.setattr("clip_linear_kernels.dispatch.choose", lambda x, form: seen.append(x) or choose(x, form))
    case = Case(normaliser="mala", length=40, den=True)
    t, other, _ = case.tensors()
    v = t.pop("v").bfloat16().requires_grad_()
    out = linear_attention(v=v, **t, **other)
    out.float().sum().backward()
    assert out.dtype == v.grad.dtype == torch.bfloat16
    assert {x.v.dtype for x in seen} == {torch.float32}
    want = linear_attention(v=v.detach().float(), **t, **other)
    assert torch.equal(out, want.bfloat16())


@needs_kernel
@pytest.mark.parametrize("heads", [1, 6])
def test_long_sequences_are_cut_and_threads_do_not_change_bits(heads):
    case = Case(batch=1, heads=heads, length=2500, width=16, normaliser="mala", den=True, mask=True)
    assert max(errors(linear_attention, case).values()) < 1e-5
    before = torch.get_num_threads()
    found = []
    for causal in (False, True):
        t, other, cotangent = replace(case, causal=causal).tensors()
        leaves = [x.requires_grad_() for x in t.values()]
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = linear_attention(**dict(zip(t, leaves)), **other)
            found.append([out, *torch.autograd.grad(out, leaves, cotangent)])
        torch.set_num_threads(before)
        for other_threads in found[-2:]:
            assert all(torch.equal(a, b) for a, b in zip(found[-3], other_threads))


@needs_kernel
def test_strides_and_alignment():
    case = Case(length=37, width=16, normaliser="affine", feature="l2")
    t, other, cotangent = case.tensors()

    def grads(q, k, v):
        out = linear_attention(q, k, v, **other)
        return [out, *torch.autograd.grad(out, (q, k, v), cotangent)]

    want = grads(*(t[n].clone().requires_grad_() for n in "qkv"))
    odd = []
    for n in "qkv":  # rows start at odd addresses, with gaps
        room = torch.zeros(t[n].numel() * 2 + 3)[3:].as_strided(t[n].shape, (1480, 740, 20, 1))
        odd.append(room.copy_(t[n]).requires_grad_())
    channels_apart = [t[n].mT.contiguous().mT.requires_grad_() for n in "qkv"]
    expanded = [t["q"], *(t[n][:, :1].expand(-1, 2, -1, -1) for n in "kv")]
    for other_layout in (odd, channels_apart):
        assert all(torch.equal(a, b) for a, b in zip(grads(*other_layout), want))
    assert torch.equal(linear_attention(*expanded, **other), linear_attention(*map(torch.clone, expanded), **other))
    cotangent = cotangent[:, :, :1].expand(-1, -1, 37, -1)  # a gradient with stride 0, as sum() makes
    assert all(torch.equal(a, b) for a, b in zip(grads(*odd), grads(*channels_apart)))


@needs_kernel
def test_masked_keys_may_hold_anything():
    for causal in (False, True):
        q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
        mask = torch.ones(1, 20, dtype=torch.bool)
        mask[:, 12:] = False
        want = linear_attention(q, k, v, feature="elu1", causal=causal, key_mask=mask)
        k[:, :, 12:], v[:, :, 12:] = float("nan"), float("inf")
        assert torch.equal(linear_attention(q, k, v, feature="elu1", causal=causal, key_mask=mask), want)


def test_what_it_does_not_serve_goes_to_torch():
    for case in (Case(dtype=torch.float64), Case(dtype=torch.float16), Case(width=130), Case(feature="focused3")):
        assert _served(case) == "eager"
        assert max(errors(linear_attention, replace(case, length=9)).values()) < 3e-3


_CALL = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO, format="%(message)s")
from clip_linear_kernels import linear_attention
import clip_linear_kernels.cpu.build as build
assert build.kernel.cache_info().currsize == 0, "built at import"
x = torch.ones(1, 1, 4, 16)
print(round(float(linear_attention(x, x, x).sum())), build.kernel().library is not None)
omp = {l.split()[-1] for l in open("/proc/self/maps") if "libgomp" in l or "libomp" in l or "libiomp" in l}
print(len(omp))
"""


def _fresh(tmp_path, **env):
    env = {**os.environ, "CLIP_LINEAR_CACHE": str(tmp_path / "cache"), "CLIP_LINEAR_BACKEND": "", **env}
    return subprocess.Popen(
        [sys.executable, "-c", _CALL], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _lines(process):
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out.split("\n"), err


def test_no_compiler(tmp_path):
    out, err = _lines(_fresh(tmp_path, CXX="no-such-compiler"))
    assert out[0] == "64 False"
    assert "install g++" in err
    assert len(err.strip().splitlines()) == 1


def test_failing_compiler(tmp_path):
    out, err = _lines(_fresh(tmp_path, CXX=shutil.which("false")))
    assert out[0] == "64 False"
    assert len(err.strip().splitlines()) == 1


@needs_kernel
def test_unwritable_cache(tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    out, err = _lines(_fresh(tmp_path))
    assert out[0] == "64 False"
    assert "CLIP_LINEAR_CACHE" in err
    assert len(err.strip().splitlines()) == 1


def test_asked_for_torch_it_is_not_built(tmp_path):
    out, _ = _lines(_fresh(tmp_path, CLIP_LINEAR_BACKEND="eager", CXX="no-such-compiler"))
    assert out[0].startswith("64")
    assert not (tmp_path / "cache").exists()


@needs_kernel
@pytest.mark.slow
def test_two_processes_build_at_once_then_nobody_again(tmp_path):
    both = [_fresh(tmp_path), _fresh(tmp_path)]
    for process in both:
        out, err = _lines(process)
        assert out[:2] == ["64 True", "1"]  # on torch's OpenMP, and on no second one
        assert err.count("compiling the CPU kernel, once") == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1
    (tmp_path / "cache").chmod(0o555)  # a read-only home that another node has filled
    out, err = _lines(_fresh(tmp_path))
    assert out[0] == "64 True"
    assert err == ""


@needs_kernel
@pytest.mark.slow
def test_sanitizers(tmp_path):
    source = Path(__file__).with_name("sanitize.cpp")
    folder = Path(build.__file__).parent
    flags = ["-std=c++17", "-O1", "-g", "-fopenmp", "-Wno-psabi", "-fsanitize=address,undefined", f"-I{folder}"]
    command = [build.compiler(), *flags, "-fno-sanitize-recover=all", str(source), "-o", str(tmp_path / "run")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "OMP_NUM_THREADS": "2"}
    run = subprocess.run([tmp_path / "run"], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip() == "ok"
