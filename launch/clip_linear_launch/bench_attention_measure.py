"""What ``clip-linear bench attention`` measures: the correctness gate, the timed candidates, ratios and slopes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clip_linear.functional import attention
from clip_linear.provenance import commit, cpu_name, date, versions_text
from clip_linear.registry import variant_class
from clip_linear_kernels import set_backend
from clip_linear_kernels.dispatch import choose, forced
from clip_linear_kernels.timing import Times, interleave, load_average, peak_bytes

# Largest error beside the largest value that the gate lets pass; float32 sums are taken in another order.
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
NAIVE_ELEMENTS = 1 << 25  # naive softmax is left out where its N×N matrix is larger


def _inputs(args: argparse.Namespace, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    shape = (args.batch, length, 3, args.heads, args.head_dim)
    qkv = torch.randn(shape, generator=g).to(args.device, dtype).requires_grad_()
    cotangent = torch.randn(args.batch, length, args.heads, args.head_dim, generator=g).to(args.device, dtype)
    return qkv, cotangent.transpose(1, 2)


def _split(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _causals(args: argparse.Namespace) -> list[bool]:
    return {"no": [False], "yes": [True], "both": [False, True]}[args.causal]


def gate(args: argparse.Namespace) -> list[str]:
    """What disagrees with the float64 reference, in output or gradient, at 197 tokens; one line each."""
    wrong = []
    dtype = getattr(torch, args.dtype)
    asked = forced()
    try:
        for variant in args.variants:
            for causal in _causals(args):
                qkv, g = _inputs(args, 197, dtype)
                set_backend(asked)
                got = attention(variant, *_split(qkv), causal=causal)
                (got_grad,) = torch.autograd.grad(got, qkv, g)
                wide = qkv.detach().double().requires_grad_()
                set_backend("reference")
                want = attention(variant, *_split(wide), causal=causal)
                (want_grad,) = torch.autograd.grad(want, wide, g.double())
                for what, a, b in (("output", got, want), ("gradient", got_grad, want_grad)):
                    error = float((a.detach().double() - b.detach()).abs().max() / b.detach().abs().max())
                    if not error <= TOLERANCE[args.dtype]:
                        wrong.append(f"{variant} {'causal ' if causal else ''}{what} is off by {error:.1e}")
    finally:
        set_backend(asked)
    return wrong


def _candidates(
    args: argparse.Namespace, variant: str, qkv: Tensor, g: Tensor, causal: bool, backward: bool, asked: str | None
) -> Iterator[tuple[tuple[str, str], Callable[[], object]]]:
    def call(function: Callable[[], Tensor], backend: str | None) -> Callable[[], object]:
        def run() -> object:
            set_backend(backend)
            if not backward:
                with torch.no_grad():
                    return function()
            return torch.autograd.grad(function(), qkv, g)

        return run

    def softmax() -> Tensor:
        q, k, v = _split(qkv)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def naive() -> Tensor:
        q, k, v = _split(qkv)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -math.inf)
        return scores.softmax(-1) @ v

    equation = variant_class(variant).attention  # as a model calls it; functional.attention checks options every time

    def linear() -> Tensor:
        return equation(*_split(qkv), causal=causal)

    set_backend(asked)  # the last candidate of the round before may have left another
    yield (variant, _provider(qkv, causal)), call(linear, asked)
    yield (variant, "eager"), call(linear, "eager")
    yield ("softmax", "sdpa"), call(softmax, asked)
    if args.batch * args.heads * qkv.shape[1] ** 2 <= NAIVE_ELEMENTS:
        yield ("softmax", "naive"), call(naive, asked)
    if args.peers:
        yield ("elu1 (fla)", "fla"), call(_peer(qkv), asked)


def _peer(qkv: Tensor) -> Callable[[], Tensor]:
    try:
        from fla.ops.linear_attn import chunk_linear_attn
    except ImportError as error:
        from clip_linear.errors import UserError

        raise UserError("--peers needs flash-linear-attention; run: pip install fla-core") from error

    def run() -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in _split(qkv))
        return chunk_linear_attn(F.elu(q) + 1, F.elu(k) + 1, v, normalize=True)[0].transpose(1, 2)

    return run


def _provider(qkv: Tensor, causal: bool) -> str:
    from clip_linear_kernels.call import Form, Inputs

    return choose(Inputs(*_split(qkv)), Form("l2", "half", causal, 1.0, 1e-6))[0]


def measure(args: argparse.Namespace, say: Callable[[str], object]) -> list[dict[str, Any]]:
    """A row for each candidate, length, mode and direction."""
    dtype, rows, asked = getattr(torch, args.dtype), [], forced()
    too_long: dict[tuple[str, str, bool, bool], int] = {}  # candidate -> the length from which it is left out
    bandwidth = _copy_bandwidth() if args.device == "cuda" else None
    try:
        for length in args.lengths:
            qkv, g = _inputs(args, length, dtype)
            for causal in _causals(args):
                for backward in {"forward": [False], "full": [True], "both": [False, True]}[args.mode]:
                    for variant in args.variants:
                        calls = {
                            name: call
                            for name, call in _candidates(args, variant, qkv, g, causal, backward, asked)
                            if too_long.get((*name, causal, backward), length + 1) > length
                        }
                        keyed = {" ".join(name): call for name, call in calls.items()}
                        times = interleave(keyed, budget_s=args.budget_s, device=args.device)
                        for name, call in calls.items():
                            t = times[" ".join(name)]
                            # The next length takes at least so much longer; softmax grows with the square.
                            if t.median * _growth(args.lengths, length, name[0]) > args.limit_s:
                                too_long.setdefault((*name, causal, backward), length + 1)
                            if name[0] == "softmax" and variant != args.variants[0]:
                                continue
                            peak = peak_bytes(call, args.device)
                            rows.append(_row(args, name, length, causal, backward, t, times, variant, peak, bandwidth))
                        say(f"N={length} causal={causal} {'full' if backward else 'forward'} {variant}: done")
    finally:
        set_backend(asked)
    return rows


def _growth(lengths: list[int], length: int, name: str) -> float:
    later = [n for n in lengths if n > length]
    return 0.0 if not later else (later[0] / length) ** (2 if name == "softmax" else 1)


def _row(
    args: argparse.Namespace,
    name: tuple[str, str],
    length: int,
    causal: bool,
    backward: bool,
    t: Times,
    times: dict[str, Times],
    variant: str,
    peak: int | None,
    bandwidth: float | None,
) -> dict[str, Any]:
    def ratio(other: str) -> float | None:
        return times[other].median / t.median if other in times else None

    size = args.batch * args.heads * length * args.head_dim * torch.finfo(getattr(torch, args.dtype)).bits / 8
    least_bytes = size * (11 if backward else 4)  # q, k, v, o; and q, k, v, ∂o, ∂q, ∂k, ∂v
    linear = name[0] != "softmax"
    return {
        "kernel_name": name[0],
        "kernel_provider": name[1],
        "kernel_operation_mode": "full" if backward else "forward",
        "causal": causal,
        "metric_name": "speed",
        "metric_unit": "ms",
        "x_name": "N",
        "x_value": length,
        "y_value_50": t.median * 1e3,
        "y_value_20": t.low * 1e3,
        "y_value_80": t.high * 1e3,
        "n": t.n,
        "ratio_to_sdpa": ratio("softmax sdpa"),
        "best_ratio_to_sdpa": times["softmax sdpa"].best / t.best if "softmax sdpa" in times else None,
        "ratio_to_eager": ratio(f"{variant} eager") if linear else None,
        "peak_mib": None if peak is None else peak / 2**20,
        "copy_bandwidth_share": least_bytes / t.median / bandwidth if bandwidth and linear else None,
        "batch": args.batch,
        "heads": args.heads,
        "head_dim": args.head_dim,
        "dtype": args.dtype,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "load_average": load_average(),
        "versions": versions_text(),
        "commit": commit(),
        "date": date(),
    }


def _copy_bandwidth() -> float:
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / interleave({"copy": lambda: y.copy_(x)}, device="cuda")["copy"].median


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per variant, provider, mode and causality: log-log slope over the last two lengths, crossover with SDPA."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in rows:
        if r["kernel_name"] != "softmax":
            key = (r["kernel_name"], r["kernel_provider"], r["kernel_operation_mode"], r["causal"])
            groups.setdefault(key, []).append(r)
    found = []
    for (name, provider, mode, causal), line in groups.items():
        slope = None
        if len(line) > 1:
            a, b = line[-2:]
            slope = math.log(b["y_value_50"] / a["y_value_50"]) / math.log(b["x_value"] / a["x_value"])
        found.append(
            {"kernel_name": name, "kernel_provider": provider, "mode": mode, "causal": causal, "slope": slope,
             "crossover_n": _crossover([(r["x_value"], r["ratio_to_sdpa"]) for r in line])}
        )  # fmt: skip
    return found


def _crossover(points: list[tuple[int, float | None]]) -> float | None:
    # Where the ratio passes 1, on a straight line between logarithms; the first length when it is above 1 there.
    known = [(n, r) for n, r in points if r is not None]
    for i, (n, r) in enumerate(known):
        if r >= 1:
            if i == 0:
                return float(n)
            m, before = known[i - 1]
            share = math.log(before) / (math.log(before) - math.log(r))
            return math.exp(math.log(m) + share * (math.log(n) - math.log(m)))
    return None
