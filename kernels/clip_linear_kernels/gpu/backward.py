"""The backward pass of ``forward``: by q, then by k and v. Centred, with

    γ_i = a'_i (g_i·φ(q_i)S_c) + (g_i·v̄)(a_i + a'_i d_i + b'_i n)     ∂φ(q_i) = a_i g_i S_cᵀ + γ_i s
    ∂φ(k_j) = w_j (∂S (v_j − v̄) + Σ γ_i φ(q_i))     ∂v_j = w_j ((φ(k_j) − k̄) ∂S + Σ (a_i d_i/n + b_i) g_i)

One gradient of the state per head, float32:
[ ∂S (F·E) | Σ γ φ(q) (F) | Σ δ φ(q_den) (F) | Σ (a d/n + b) g (E) | Σ b g (E) | ∂n | 15 unused ].
"""

from __future__ import annotations

import triton
import triton.language as tl

from clip_linear_kernels.gpu.forward import load_centred
from clip_linear_kernels.gpu.tiles import (
    cast,
    coefficients,
    coefficients_by_d,
    coefficients_by_n,
    dot,
    feature,
    feature_vjp,
    load_rows,
    store_rows,
)


@triton.jit
def backward_q(
    Q, QD, EPS, ST, DO, DQ, DQD, DST, N, H, NSPLIT, scale, eps,
    sq_b, sq_h, sq_n, sqd_b, sqd_h, sqd_n, se_b, se_h, se_n, sdo_b, sdo_h, sdo_n,
    sdq_b, sdq_h, sdq_n, sdqd_b, sdqd_h, sdqd_n,
    PHI: tl.constexpr, NORM: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    BN: tl.constexpr, HAS_DEN: tl.constexpr, HAS_EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (NSPLIT, B·H): gradients by q (and q_den) of one part of the queries, and their sums for the keys."""
    sp = tl.program_id(0)
    bh = tl.program_id(1)
    b_ = (bh // H).to(tl.int64)
    h = bh % H
    dtype: tl.constexpr = Q.dtype.element_ty
    per = tl.cdiv(tl.cdiv(N, BN), NSPLIT) * BN
    lo = sp * per
    hi = tl.minimum(lo + per, N)
    S_ct, s, sd, v_mean, n = load_centred(ST, bh, FP, EP, True)
    S_ct = cast(S_ct, dtype)
    dS = tl.zeros([FP, EP], tl.float32)
    ds = tl.zeros([FP], tl.float32)
    dsd = tl.zeros([FP], tl.float32)
    dvc = tl.zeros([EP], tl.float32)
    du = tl.zeros([EP], tl.float32)
    dn = tl.zeros([BN], tl.float32)
    for start in range(lo, hi, BN):
        rows = start + tl.arange(0, BN)
        keep = rows < hi
        q = load_rows(Q + b_ * sq_b + h * sq_h, rows, sq_n, keep, F, FP).to(tl.float32)
        g = load_rows(DO + b_ * sdo_b + h * sdo_h, rows, sdo_n, keep, E, EP)
        g32 = g.to(tl.float32)
        phi = feature(q, keep, PHI, F, FP)
        g_S = dot(cast(g, dtype), S_ct, PRECISION)  # [BN, F]
        g_v = tl.sum(g32 * v_mean[None, :], axis=1)
        along = tl.sum(g_S * phi, axis=1)
        d_num = tl.sum(phi * s[None, :], axis=1)
        d = d_num
        if HAS_DEN:
            qd = load_rows(QD + b_ * sqd_b + h * sqd_h, rows, sqd_n, keep, F, FP).to(tl.float32)
            phi_d = feature(qd, keep, PHI, F, FP)
            d = tl.sum(phi_d * sd[None, :], axis=1)
        if HAS_EPS:
            eps = tl.load(EPS + b_ * se_b + h * se_h + rows.to(tl.int64) * se_n, mask=keep, other=1.0)
        a, b = coefficients(d, n, scale, eps, NORM)
        a_d, b_d = coefficients_by_d(d, n, scale, eps, NORM)
        a_n, b_n = coefficients_by_n(d, n, scale, eps, NORM)
        if HAS_DEN:
            gamma = a * g_v
            delta = tl.where(keep, a_d * (along + d_num * g_v) + b_d * n * g_v, 0.0)
            dqd = feature_vjp(qd, delta[:, None] * sd[None, :], PHI, F, FP)
            store_rows(DQD + b_ * sdqd_b + h * sdqd_h, rows, sdqd_n, keep, dqd, F, FP)
            dsd += tl.sum(delta[:, None] * phi_d, axis=0)
        else:
            gamma = a_d * along + g_v * (a + a_d * d + b_d * n)
        gamma = tl.where(keep, gamma, 0.0)
        dq = feature_vjp(q, a[:, None] * g_S + gamma[:, None] * s[None, :], PHI, F, FP)
        store_rows(DQ + b_ * sdq_b + h * sdq_h, rows, sdq_n, keep, dq, F, FP)
        ds += tl.sum(gamma[:, None] * phi, axis=0)
        g_a = tl.where(keep[:, None], a[:, None] * g32, 0.0)
        dS += dot(tl.trans(cast(phi, dtype)), cast(g_a, dtype), PRECISION)
        dvc += tl.sum(tl.where(keep[:, None], (a * d_num / n + b)[:, None] * g32, 0.0), axis=0)
        du += tl.sum(tl.where(keep[:, None], b[:, None] * g32, 0.0), axis=0)
        dn += tl.where(keep, a_n * (along + d_num * g_v) + b_n * n * g_v, 0.0)
    SIZE: tl.constexpr = FP * EP + 2 * FP + 2 * EP + 16
    at = DST + (bh.to(tl.int64) * NSPLIT + sp) * SIZE
    f = tl.arange(0, FP)
    e = tl.arange(0, EP)
    tl.store(at + f[:, None] * EP + e[None, :], dS)
    tl.store(at + FP * EP + f, ds)
    tl.store(at + FP * EP + FP + f, dsd)
    tl.store(at + FP * EP + 2 * FP + e, dvc)
    tl.store(at + FP * EP + 2 * FP + EP + e, du)
    tl.store(at + FP * EP + 2 * FP + 2 * EP, tl.sum(dn, axis=0))


@triton.jit
def backward_kv(
    K, V, KD, W, ST, DST, DK, DV, DKD, DW, M, H,
    sk_b, sk_h, sk_n, sv_b, sv_h, sv_n, skd_b, skd_h, skd_n, sw_b, sw_h,
    sdk_b, sdk_h, sdk_n, sdv_b, sdv_h, sdv_n, sdkd_b, sdkd_h, sdkd_n,
    PHI: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BN: tl.constexpr,
    HAS_W: tl.constexpr, HAS_DEN: tl.constexpr, NEEDS_DW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (⌈M/BN⌉, B·H): gradients by k, v (and k_den, and w as [B·H, M]) of one block of keys."""
    bh = tl.program_id(1)
    b_ = (bh // H).to(tl.int64)
    h = bh % H
    dtype: tl.constexpr = K.dtype.element_ty
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    keep = rows < M
    f = tl.arange(0, FP)
    e = tl.arange(0, EP)
    at = ST + bh.to(tl.int64) * (FP * EP + 2 * FP + EP + 16) + FP * EP
    count = tl.load(at + 2 * FP + EP)
    n = tl.where(count > 0, count, 1.0)
    k_mean = tl.load(at + f) / n
    v_mean = tl.load(at + 2 * FP + e) / n
    SIZE: tl.constexpr = FP * EP + 2 * FP + 2 * EP + 16
    at = DST + bh.to(tl.int64) * SIZE
    dS = cast(tl.load(at + f[:, None] * EP + e[None, :]), dtype)
    ds = tl.load(at + FP * EP + f)
    dvc = tl.load(at + FP * EP + 2 * FP + e)
    k = load_rows(K + b_ * sk_b + h * sk_h, rows, sk_n, keep, F, FP).to(tl.float32)
    v = load_rows(V + b_ * sv_b + h * sv_h, rows, sv_n, keep, E, EP).to(tl.float32)
    phi = feature(k, keep, PHI, F, FP)
    dphi = dot(cast(v - v_mean[None, :], dtype), tl.trans(dS), PRECISION) + ds[None, :]
    dv = dot(cast(phi - k_mean[None, :], dtype), dS, PRECISION) + dvc[None, :]
    if NEEDS_DW:
        du = tl.load(at + FP * EP + 2 * FP + EP + e)
        dw = tl.sum(phi * dphi, axis=1) + tl.sum(v * du[None, :], axis=1)
        dw += tl.where(count > 0, tl.load(at + FP * EP + 2 * FP + 2 * EP), 0.0)
    if HAS_W:
        w = tl.load(W + b_ * sw_b + h * sw_h + rows, mask=keep, other=0.0)
        dphi = dphi * w[:, None]
        dv = dv * w[:, None]
    dk = feature_vjp(k, dphi, PHI, F, FP)
    if HAS_DEN:
        kd = load_rows(KD + b_ * skd_b + h * skd_h, rows, skd_n, keep, F, FP).to(tl.float32)
        dsd = tl.load(at + FP * EP + FP + f)
        if NEEDS_DW:
            dw += tl.sum(feature(kd, keep, PHI, F, FP) * dsd[None, :], axis=1)
        dphi_d = tl.zeros([BN, FP], tl.float32) + dsd[None, :]
        if HAS_W:
            dphi_d = dphi_d * w[:, None]
        dkd = feature_vjp(kd, dphi_d, PHI, F, FP)
        store_rows(DKD + b_ * sdkd_b + h * sdkd_h, rows, sdkd_n, keep, dkd, F, FP)
    if NEEDS_DW:
        tl.store(DW + bh.to(tl.int64) * M + rows, dw, mask=keep)
    store_rows(DK + b_ * sdk_b + h * sdk_h, rows, sdk_n, keep, dk, F, FP)
    store_rows(DV + b_ * sdv_b + h * sdv_h, rows, sdv_n, keep, dv, E, EP)
