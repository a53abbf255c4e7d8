"""Causal kernels: chunks of C tokens, the masked quadratic form inside, the state carried from chunk to chunk.

A sequence may be cut into NSPLIT segments that run in parallel; the state before each is summed up beforehand. As in
``noncausal`` everything is centred, here by the first value c = v_0 (zero where it is masked): it cancels exactly, and
unlike a mean it lets no later token into an earlier row. States: the layout of ``noncausal``, S and u of v − c.

No product reads the transpose of an accumulator (wrong gradients on Hopper): a transposed state is accumulated as such.
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
def first_value(V, W, E: tl.constexpr, EP: tl.constexpr, HAS_W: tl.constexpr):
    """c [E] in float32."""
    e = tl.arange(0, EP)
    c = tl.load(V + e, mask=e < E, other=0.0).to(tl.float32)
    if HAS_W:
        c = tl.where(tl.load(W) > 0, c, 0.0)
    return c


@triton.jit
def centred_keys(
    K, V, W, c, rows, keep, sk_n, sv_n,
    PHI: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, HAS_W: tl.constexpr,
):  # fmt: skip
    """φ(k) and v − c in float32, zero where nothing is seen; w."""
    w = tl.where(keep, 1.0, 0.0)
    if HAS_W:
        w = tl.load(W + rows, mask=keep, other=0.0)
    seen = w > 0
    phi = feature(load_rows(K, rows, sk_n, keep, F, FP).to(tl.float32), keep, PHI, F, FP)
    v = load_rows(V, rows, sv_n, keep, E, EP).to(tl.float32) - c[None, :]
    return tl.where(seen[:, None], phi, 0.0), tl.where(seen[:, None], v, 0.0), w


@triton.jit
def causal_forward(
    Q, K, V, QD, KD, W, EPS, ST, OUT, N, H, NSPLIT, scale, eps,
    sq_b, sq_h, sq_n, sk_b, sk_h, sk_n, sv_b, sv_h, sv_n, sqd_b, sqd_h, sqd_n, skd_b, skd_h, skd_n,
    sw_b, sw_h, se_b, se_h, se_n, so_b, so_h, so_n,
    PHI: tl.constexpr, NORM: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    C: tl.constexpr, HAS_W: tl.constexpr, HAS_DEN: tl.constexpr, HAS_EPS: tl.constexpr, HAS_STATE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (NSPLIT, B·H). ST [B·H, NSPLIT, SIZE]: the uncentred state before each segment."""
    sp = tl.program_id(0)
    bh = tl.program_id(1)
    b_ = (bh // H).to(tl.int64)
    h = bh % H
    dtype: tl.constexpr = OUT.dtype.element_ty
    K += b_ * sk_b + h * sk_h
    V += b_ * sv_b + h * sv_h
    W += b_ * sw_b + h * sw_h
    per = tl.cdiv(tl.cdiv(N, C), NSPLIT) * C
    lo = sp * per
    hi = tl.minimum(lo + per, N)
    c = first_value(V, W, E, EP, HAS_W)
    S = tl.zeros([FP, EP], tl.float32)
    s = tl.zeros([FP], tl.float32)
    sd = tl.zeros([FP], tl.float32)
    u = tl.zeros([EP], tl.float32)
    seen = 0.0
    f = tl.arange(0, FP)
    e = tl.arange(0, EP)
    r = tl.arange(0, C)
    if HAS_STATE:
        at = ST + (bh.to(tl.int64) * NSPLIT + sp) * (FP * EP + 2 * FP + EP + 16)
        s = tl.load(at + FP * EP + f)
        sd = tl.load(at + FP * EP + FP + f)
        seen = tl.load(at + FP * EP + 2 * FP + EP)
        u = tl.load(at + FP * EP + 2 * FP + e) - seen * c
        S = tl.load(at + f[:, None] * EP + e[None, :]) - s[:, None] * c[None, :]
    lower = r[:, None] >= r[None, :]
    for start in range(lo, hi, C):
        rows = start + r
        keep = rows < hi
        q = load_rows(Q + b_ * sq_b + h * sq_h, rows, sq_n, keep, F, FP).to(tl.float32)
        phi_q = feature(q, keep, PHI, F, FP)
        phi_k, v, w = centred_keys(K, V, W, c, rows, keep, sk_n, sv_n, PHI, F, FP, E, EP, HAS_W)
        qh = cast(phi_q, dtype)
        kh = cast(phi_k, dtype)
        vh = cast(v, dtype)
        A = dot(qh, tl.trans(kh), PRECISION)
        A = tl.where(lower, A * w[None, :], 0.0)
        d_num = tl.sum(A, axis=1) + tl.sum(phi_q * s[None, :], axis=1)
        d = d_num
        if HAS_DEN:
            qd = load_rows(QD + b_ * sqd_b + h * sqd_h, rows, sqd_n, keep, F, FP).to(tl.float32)
            kd = load_rows(KD + b_ * skd_b + h * skd_h, rows, skd_n, keep, F, FP).to(tl.float32)
            phi_qd = feature(qd, keep, PHI, F, FP)
            phi_kd = feature(kd, keep, PHI, F, FP)
            D = dot(cast(phi_qd, dtype), tl.trans(cast(phi_kd, dtype)), PRECISION)
            d = tl.sum(tl.where(lower, D * w[None, :], 0.0), axis=1) + tl.sum(phi_qd * sd[None, :], axis=1)
            sd += tl.sum(phi_kd * w[:, None], axis=0)
        w_tile = tl.where(lower, tl.broadcast_to(w[None, :], (C, C)), 0.0)
        n_true = seen + tl.sum(w_tile, axis=1)
        n = tl.where(n_true > 0, n_true, 1.0)
        if HAS_EPS:
            eps = tl.load(EPS + b_ * se_b + h * se_h + rows.to(tl.int64) * se_n, mask=keep, other=1.0)
        a, b = coefficients(d, n, scale, eps, NORM)
        # The affine constant is a free add to the score tile.
        P = a[:, None] * A + b[:, None] * w_tile
        o = dot(cast(P, dtype), vh, PRECISION)
        o += a[:, None] * dot(qh, cast(S, dtype), PRECISION) + b[:, None] * u[None, :]
        o += (a * d_num + b * n_true)[:, None] * c[None, :]
        store_rows(OUT + b_ * so_b + h * so_h, rows, so_n, keep, o, E, EP)
        kw = cast(kh.to(tl.float32) * w[:, None], dtype)
        S += dot(tl.trans(kw), vh, PRECISION)
        s += tl.sum(kw.to(tl.float32), axis=0)
        u += tl.sum(v * w[:, None], axis=0)
        seen += tl.sum(w, axis=0)
