"""Non-causal kernels, forward: state, apply, and both in one program for short N.

All kernels work on the CENTRED form. With v̄ = u/n, k̄ = s/n and S_c = S − s v̄ᵀ,

    o_i = a_i φ(q_i) S_c + (a_i d_i + b_i n) v̄,

which is the same number, but keeps what depends on the query when the mean of v is large: in bfloat16 the plain form
loses up to a third of it. One state per head, float32:
[ S (F·E) | s (F) | s of the denominator (F) | u (E) | n | 15 unused ].
"""

from __future__ import annotations

import triton
import triton.language as tl

from clip_linear_kernels.gpu.tiles import (
    cast,
    coefficients,
    dot,
    feature,
    load_rows,
    store_rows,
)


@triton.jit
def _state(
    K, V, KD, W, lo, hi, sk_n, sv_n, skd_n,
    PHI: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BN: tl.constexpr,
    HAS_W: tl.constexpr, HAS_DEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    S = tl.zeros([FP, EP], tl.float32)
    s = tl.zeros([FP], tl.float32)
    sd = tl.zeros([FP], tl.float32)
    u = tl.zeros([EP], tl.float32)
    n = tl.zeros([BN], tl.float32)
    for start in range(lo, hi, BN):
        rows = start + tl.arange(0, BN)
        keep = rows < hi
        k = load_rows(K, rows, sk_n, keep, F, FP)
        v = load_rows(V, rows, sv_n, keep, E, EP)
        phi = feature(k.to(tl.float32), keep, PHI, F, FP)
        v32 = v.to(tl.float32)
        if HAS_W:
            w = tl.load(W + rows, mask=keep, other=0.0)
            seen = w > 0
            phi = tl.where(seen[:, None], phi * w[:, None], 0.0)
            v32 = tl.where(seen[:, None], v32, 0.0)
            v = cast(v32, v.dtype)
            u += tl.sum(v32 * w[:, None], axis=0)
            n += w
        else:
            u += tl.sum(v32, axis=0)
            n += tl.where(keep, 1.0, 0.0)
        phi = cast(phi, v.dtype)
        s += tl.sum(phi.to(tl.float32), axis=0)
        S += dot(tl.trans(phi), v, PRECISION)
        if HAS_DEN:
            phi = feature(load_rows(KD, rows, skd_n, keep, F, FP).to(tl.float32), keep, PHI, F, FP)
            if HAS_W:
                phi = tl.where(seen[:, None], phi * w[:, None], 0.0)
            sd += tl.sum(phi, axis=0)
    return S, s, sd, u, tl.sum(n, axis=0)


@triton.jit
def _store_state(ST, S, s, sd, u, n, FP: tl.constexpr, EP: tl.constexpr):
    f = tl.arange(0, FP)
    e = tl.arange(0, EP)
    tl.store(ST + f[:, None] * EP + e[None, :], S)
    tl.store(ST + FP * EP + f, s)
    tl.store(ST + FP * EP + FP + f, sd)
    tl.store(ST + FP * EP + 2 * FP + e, u)
    tl.store(ST + FP * EP + 2 * FP + EP, n)


@triton.jit
def state_forward(
    K, V, KD, W, ST, M, H, NSPLIT,
    sk_b, sk_h, sk_n, sv_b, sv_h, sv_n, skd_b, skd_h, skd_n, sw_b, sw_h,
    PHI: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BN: tl.constexpr,
    HAS_W: tl.constexpr, HAS_DEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (NSPLIT, B·H): the state of one part of the keys."""
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = bh % H
    per = tl.cdiv(tl.cdiv(M, BN), NSPLIT) * BN
    lo = tl.program_id(0) * per
    S, s, sd, u, n = _state(
        K + b * sk_b + h * sk_h, V + b * sv_b + h * sv_h, KD + b * skd_b + h * skd_h, W + b * sw_b + h * sw_h,
        lo, tl.minimum(lo + per, M), sk_n, sv_n, skd_n, PHI, F, FP, E, EP, BN, HAS_W, HAS_DEN, PRECISION,
    )  # fmt: skip
    SIZE: tl.constexpr = FP * EP + 2 * FP + EP + 16
    _store_state(ST + (bh.to(tl.int64) * NSPLIT + tl.program_id(0)) * SIZE, S, s, sd, u, n, FP, EP)


@triton.jit
def _apply(
    Q, QD, EPS, OUT, S_c, s, sd, v_mean, n, lo, N, scale, eps, sq_n, sqd_n, se_n, so_n, dtype: tl.constexpr,
    PHI: tl.constexpr, NORM: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    BN: tl.constexpr, HAS_DEN: tl.constexpr, HAS_EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = lo + tl.arange(0, BN)
    keep = rows < N
    phi = feature(load_rows(Q, rows, sq_n, keep, F, FP).to(tl.float32), keep, PHI, F, FP)
    y = dot(cast(phi, dtype), S_c, PRECISION)
    d_num = tl.sum(phi * s[None, :], axis=1)
    d = d_num
    if HAS_DEN:
        phi = feature(load_rows(QD, rows, sqd_n, keep, F, FP).to(tl.float32), keep, PHI, F, FP)
        d = tl.sum(phi * sd[None, :], axis=1)
    if HAS_EPS:
        eps = tl.load(EPS + rows.to(tl.int64) * se_n, mask=keep, other=1.0)
    a, b = coefficients(d, n, scale, eps, NORM)
    o = a[:, None] * y + (a * d_num + b * n)[:, None] * v_mean[None, :]
    store_rows(OUT, rows, so_n, keep, o, E, EP)


@triton.jit
def apply_forward(
    Q, QD, EPS, ST, OUT, N, H, scale, eps,
    sq_b, sq_h, sq_n, sqd_b, sqd_h, sqd_n, se_b, se_h, se_n, so_b, so_h, so_n,
    PHI: tl.constexpr, NORM: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    BN: tl.constexpr, HAS_DEN: tl.constexpr, HAS_EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (⌈N/BN⌉, B·H): the output of one block of queries from the head's state."""
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = bh % H
    S_c, s, sd, v_mean, n = load_centred(ST, bh, FP, EP, False)
    _apply(
        Q + b * sq_b + h * sq_h, QD + b * sqd_b + h * sqd_h, EPS + b * se_b + h * se_h, OUT + b * so_b + h * so_h,
        cast(S_c, OUT.dtype.element_ty), s, sd, v_mean, n, tl.program_id(0) * BN, N, scale, eps,
        sq_n, sqd_n, se_n, so_n, OUT.dtype.element_ty, PHI, NORM, F, FP, E, EP, BN, HAS_DEN, HAS_EPS, PRECISION,
    )  # fmt: skip


@triton.jit
def load_centred(ST, bh, FP: tl.constexpr, EP: tl.constexpr, TRANSPOSED: tl.constexpr):
    """S_c (or its transpose), s, s of the denominator, v̄ and n (1 where nothing is seen) of one head."""
    SIZE: tl.constexpr = FP * EP + 2 * FP + EP + 16
    at = ST + bh.to(tl.int64) * SIZE
    f = tl.arange(0, FP)
    e = tl.arange(0, EP)
    s = tl.load(at + FP * EP + f)
    sd = tl.load(at + FP * EP + FP + f)
    n = tl.load(at + FP * EP + 2 * FP + EP)
    n = tl.where(n > 0, n, 1.0)
    v_mean = tl.load(at + FP * EP + 2 * FP + e) / n
    if TRANSPOSED:
        S_c = tl.load(at + f[None, :] * EP + e[:, None]) - v_mean[:, None] * s[None, :]
    else:
        S_c = tl.load(at + f[:, None] * EP + e[None, :]) - s[:, None] * v_mean[None, :]
    return S_c, s, sd, v_mean, n


@triton.jit
def fused_forward(
    Q, K, V, QD, KD, W, EPS, ST, OUT, N, M, H, scale, eps,
    sq_b, sq_h, sq_n, sk_b, sk_h, sk_n, sv_b, sv_h, sv_n, sqd_b, sqd_h, sqd_n, skd_b, skd_h, skd_n,
    sw_b, sw_h, se_b, se_h, se_n, so_b, so_h, so_n,
    PHI: tl.constexpr, NORM: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    BN: tl.constexpr, HAS_W: tl.constexpr, HAS_DEN: tl.constexpr, HAS_EPS: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B·H,): a whole head; its state is written out only when ``KEEP``."""
    bh = tl.program_id(0)
    b = (bh // H).to(tl.int64)
    h = bh % H
    S, s, sd, u, n = _state(
        K + b * sk_b + h * sk_h, V + b * sv_b + h * sv_h, KD + b * skd_b + h * skd_h, W + b * sw_b + h * sw_h,
        0, M, sk_n, sv_n, skd_n, PHI, F, FP, E, EP, BN, HAS_W, HAS_DEN, PRECISION,
    )  # fmt: skip
    if KEEP:
        SIZE: tl.constexpr = FP * EP + 2 * FP + EP + 16
        _store_state(ST + bh.to(tl.int64) * SIZE, S, s, sd, u, n, FP, EP)
    n = tl.where(n > 0, n, 1.0)
    v_mean = u / n
    S_c = cast(S - s[:, None] * v_mean[None, :], OUT.dtype.element_ty)
    for lo in range(0, N, BN):
        _apply(
            Q + b * sq_b + h * sq_h, QD + b * sqd_b + h * sqd_h, EPS + b * se_b + h * se_h, OUT + b * so_b + h * so_h,
            S_c, s, sd, v_mean, n, lo, N, scale, eps, sq_n, sqd_n, se_n, so_n,
            OUT.dtype.element_ty, PHI, NORM, F, FP, E, EP, BN, HAS_DEN, HAS_EPS, PRECISION,
        )  # fmt: skip
