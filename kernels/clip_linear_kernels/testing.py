"""Cases on which a backend is compared with the reference, outputs and gradients: for tests, benches and GPU checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clip_linear_kernels.reference import linear_attention_reference
from clip_linear_kernels.spec import FEATURES, NORMALISERS

# Their denominators cross zero for features of mixed sign; there the comparison would measure the condition number.
_POSITIVE_ONLY = ("mean", "sum", "mala")
# (normaliser, feature): the pairs that variants use.
MODES = (
    ("mean", "elu1"),
    ("sum", "relu"),
    ("affine", "l2"),
    ("half", "l2"),
    ("half_mean", "l2"),
    ("mala", "elu1"),
    ("inline", "identity"),
    ("mean", "exp"),
    ("mean", "focused3"),
    ("none", "identity"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call: sizes, mode, and which of the optional tensors are there."""

    normaliser: str = "mean"
    feature: str = "elu1"
    batch: int = 2
    heads: int = 2
    length: int = 33
    keys: int | None = None  # None: as many as queries
    width: int = 16  # F
    value_width: int | None = None  # E; None: F
    causal: bool = False
    den: bool = False
    weights: bool = False
    mask: bool = False
    row_eps: bool = False
    packed: bool = False  # q, k, v are strided views of one [B, N, 3, H, D] tensor
    mean_v: float = 0.0
    dtype: torch.dtype = torch.float32

    def tensors(self, device: str = "cpu", seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
        """(differentiable tensors by name, the other arguments, the output's cotangent)."""
        g = torch.Generator().manual_seed(seed)
        keys = self.keys or self.length
        E = self.value_width or self.width

        def draw(*shape: int) -> Tensor:
            x = torch.randn(*shape, generator=g)
            if self.feature == "identity" and self.normaliser in _POSITIVE_ONLY:
                x = x.abs() + 0.1
            return x.to(device, self.dtype)

        B, H, N, F = self.batch, self.heads, self.length, self.width
        if self.packed:
            assert keys == N and E == F
            q, k, v = draw(B, N, 3, H, F).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = draw(B, H, N, F), draw(B, H, keys, F), draw(B, H, keys, E)
        t = {"q": q, "k": k, "v": (v + self.mean_v).to(self.dtype) if self.mean_v else v}
        if self.den:
            t["q_den"], t["k_den"] = draw(B, H, N, F), draw(B, H, keys, F)
        if self.weights:
            at_least_32 = torch.promote_types(self.dtype, torch.float32)
            t["weights"] = (torch.rand(B, H, keys, generator=g) + 0.1).to(device, at_least_32)
        other: dict[str, Any] = {
            "feature": self.feature,
            "normaliser": self.normaliser,
            "causal": self.causal,
            "scale": F**-0.5,
            "eps": 1e-6 if self.normaliser == "mala" else 1e-3,
        }
        if self.row_eps:
            other["eps"] = (torch.rand(B, H, N, 1, generator=g) * 1e-2 + 1e-3).to(device)
        cotangent = torch.randn(B, H, N, E, generator=g).to(device, self.dtype)
        if self.mask:
            keep = torch.rand(B, keys, generator=g) > 0.3
            keep[:, : min(3, keys - 1)] = False  # left padding: the first causal rows see nothing
            keep[:, -1] = True
            other["key_mask"] = keep.to(device)
            if self.causal:  # such rows are a don't-care
                cotangent = cotangent * (keep.cumsum(1) > 0)[:, None, :, None].to(device)
        return t, other, cotangent


def errors(function: Callable[..., Tensor], case: Case, device: str = "cpu", seed: int = 0) -> dict[str, float]:
    """Largest error of the output and of each gradient of ``function`` against the float64 reference.

    Each is relative to the largest value of its own kind, but at least to 10 % of the largest gradient: at N = 1
    some true gradients are zero. The reference sees the same rounded inputs.
    """
    t, other, cotangent = case.tensors(device, seed)
    leaves = {name: x.detach().requires_grad_() for name, x in t.items()}
    out = function(**leaves, **other)
    assert bool(out.isfinite().all()), f"not finite: {case}"
    got = torch.autograd.grad(out, list(leaves.values()), cotangent, allow_unused=True)
    wide: dict[str, Any] = {name: x.detach().double().requires_grad_() for name, x in t.items()}
    expected = linear_attention_reference(**wide, **other)
    want = torch.autograd.grad(expected, list(wide.values()), cotangent.double(), allow_unused=True)
    seen = cotangent.abs().amax(-1, keepdim=True) > 0
    found = {"out": _relative(out * seen, expected * seen, 1e-30)}
    floor = 0.1 * max(float(w.abs().max()) for w in want if w is not None)
    for name, g, w in zip(leaves, got, want):
        zero = torch.zeros_like(leaves[name])
        found[name] = _relative(zero if g is None else g, zero if w is None else w, floor)
    return found


def _relative(a: Tensor, b: Tensor, floor: float) -> float:
    return float((a.detach().double() - b.detach().double()).abs().max()) / max(float(b.detach().abs().max()), floor)


def cases(base: Case, lengths: tuple[int, ...] = (1, 2, 31, 33, 197)) -> Iterator[Case]:
    """Every mode at ragged lengths, causal and not, with each optional tensor, then all pairs of tables once."""
    for causal in (False, True):
        for normaliser, feature in MODES:
            mode = replace(base, normaliser=normaliser, feature=feature, causal=causal)
            for length in lengths:
                yield replace(mode, length=length)
            yield replace(mode, length=45, packed=True)
            yield replace(mode, length=45, mask=True)
            yield replace(mode, length=45, weights=True)
            yield replace(mode, length=45, den=True, mask=True)
        yield replace(base, causal=causal, length=45, row_eps=True)
        yield replace(base, causal=causal, length=45, value_width=2 * base.width, weights=True, mask=True, den=True)
        yield replace(base, causal=causal, length=45, width=2 * base.width, value_width=base.width)
        for feature in FEATURES:
            for normaliser in NORMALISERS:
                if (feature, normaliser) != ("l2", "mala") and not (feature == "l2" and normaliser in _POSITIVE_ONLY):
                    yield replace(base, causal=causal, length=19, feature=feature, normaliser=normaliser)
    yield replace(base, length=45, keys=29)
