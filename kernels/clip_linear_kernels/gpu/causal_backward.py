"""The backward pass of ``causal_forward``: by q in a forward scan, by k and v in a backward scan.

Inside a chunk, with A_ij = w_j φ(q_i)·φ(k_j), G_ij = g_i·(v_j − c) and the state S before it,

    g_i·(y_i − d_i c) = Σ_j A_ij G_ij + (g_i Sᵀ)·φ(q_i)
    ∂φ(q_i) = Σ_{j≤i} w_j (a_i G_ij + γ_i) φ(k_j) + a_i g_i Sᵀ + γ_i s

with γ of ``backward`` (a g·c where the denominator has its own q and k): its gradient is a free add to the tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from clip_linear_kernels.gpu.causal_forward import centred_keys, first_value
from clip_linear_kernels.gpu.tiles import (
    cast,
    coefficients,
    coefficients_by_d,
    dot,
    feature,
    feature_vjp,
    load_rows,
    store_rows,
)


@triton.jit
def causal_backward_q(
    Q, K, V, QD, KD, W, EPS, ST, DO, DQ, DQD, SC, N, H, NSPLIT, scale, eps,
    sq_b, sq_h, sq_n, sk_b, sk_h, sk_n, sv_b, sv_h, sv_n, sqd_b, sqd_h, sqd_n, skd_b, skd_h, skd_n,
    sw_b, sw_h, se_b, se_h, se_n, sdo_b, sdo_h, sdo_n, sdq_b, sdq_h, sdq_n, sdqd_b, sdqd_h, sdqd_n,
    PHI: tl.constexpr, NORM: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    C: tl.constexpr, HAS_W: tl.constexpr, HAS_DEN: tl.constexpr, HAS_EPS: tl.constexpr, HAS_STATE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (NSPLIT, B·H), a forward scan. Writes ∂q, ∂q_den and SC [4, B·H, N]: a, b, γ, δ for the keys' pass."""
    sp = tl.program_id(0)
    bh = tl.program_id(1)
    b_ = (bh // H).to(tl.int64)
    h = bh % H
    dtype: tl.constexpr = Q.dtype.element_ty
    K += b_ * sk_b + h * sk_h
    V += b_ * sv_b + h * sv_h
    W += b_ * sw_b + h * sw_h
    per = tl.cdiv(tl.cdiv(N, C), NSPLIT) * C
    lo = sp * per
    hi = tl.minimum(lo + per, N)
    c = first_value(V, W, E, EP, HAS_W)
    St = tl.zeros([EP, FP], tl.float32)
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
        St = tl.load(at + f[None, :] * EP + e[:, None]) - c[:, None] * s[None, :]
    lower = r[:, None] >= r[None, :]
    plane = tl.num_programs(1).to(tl.int64) * N
    SC += bh.to(tl.int64) * N
    for start in range(lo, hi, C):
        rows = start + r
        keep = rows < hi
        q = load_rows(Q + b_ * sq_b + h * sq_h, rows, sq_n, keep, F, FP).to(tl.float32)
        g = load_rows(DO + b_ * sdo_b + h * sdo_h, rows, sdo_n, keep, E, EP).to(tl.float32)
        phi_q = feature(q, keep, PHI, F, FP)
        phi_k, v, w = centred_keys(K, V, W, c, rows, keep, sk_n, sv_n, PHI, F, FP, E, EP, HAS_W)
        kh = cast(phi_k, dtype)
        gh = cast(g, dtype)
        vh = cast(v, dtype)
        A = tl.where(lower, dot(cast(phi_q, dtype), tl.trans(kh), PRECISION) * w[None, :], 0.0)
        G = tl.where(lower, dot(gh, tl.trans(vh), PRECISION), 0.0)
        g_S = dot(gh, cast(St, dtype), PRECISION)
        g_c = tl.sum(g * c[None, :], axis=1)
        d_num = tl.sum(A, axis=1) + tl.sum(phi_q * s[None, :], axis=1)
        d = d_num
        if HAS_DEN:
            qd = load_rows(QD + b_ * sqd_b + h * sqd_h, rows, sqd_n, keep, F, FP).to(tl.float32)
            kd = load_rows(KD + b_ * skd_b + h * skd_h, rows, skd_n, keep, F, FP).to(tl.float32)
            phi_qd = feature(qd, keep, PHI, F, FP)
            phi_kd = feature(kd, keep, PHI, F, FP)
            D = dot(cast(phi_qd, dtype), tl.trans(cast(phi_kd, dtype)), PRECISION)
            d = tl.sum(tl.where(lower, D * w[None, :], 0.0), axis=1) + tl.sum(phi_qd * sd[None, :], axis=1)
        w_tile = tl.where(lower, tl.broadcast_to(w[None, :], (C, C)), 0.0)
        n_true = seen + tl.sum(w_tile, axis=1)
        n = tl.where(n_true > 0, n_true, 1.0)
        if HAS_EPS:
            eps = tl.load(EPS + b_ * se_b + h * se_h + rows.to(tl.int64) * se_n, mask=keep, other=1.0)
        a, b = coefficients(d, n, scale, eps, NORM)
        a_d, b_d = coefficients_by_d(d, n, scale, eps, NORM)
        along = tl.sum(A * G, axis=1) + tl.sum(g_S * phi_q, axis=1)
        g_u = tl.sum(G * w[None, :], axis=1) + tl.sum(g * u[None, :], axis=1)  # g·(u − n c)
        if HAS_DEN:
            gamma = a * g_c
            delta = a_d * (along + d_num * g_c) + b_d * (g_u + n_true * g_c)
            delta = tl.where(keep, delta, 0.0)
            weights = delta[:, None] * w_tile
            dqd = dot(cast(weights, dtype), cast(phi_kd, dtype), PRECISION) + delta[:, None] * sd[None, :]
            dqd = feature_vjp(qd, dqd, PHI, F, FP)
            store_rows(DQD + b_ * sdqd_b + h * sdqd_h, rows, sdqd_n, keep, dqd, F, FP)
            sd += tl.sum(phi_kd * w[:, None], axis=0)
            tl.store(SC + 3 * plane + rows, delta, mask=keep)
        else:
            gamma = a_d * along + b_d * g_u + g_c * (a + a_d * d + b_d * n_true)
        gamma = tl.where(keep, gamma, 0.0)
        dA = tl.where(lower, (a[:, None] * G + gamma[:, None]) * w[None, :], 0.0)
        dq = dot(cast(dA, dtype), kh, PRECISION) + a[:, None] * g_S + gamma[:, None] * s[None, :]
        store_rows(DQ + b_ * sdq_b + h * sdq_h, rows, sdq_n, keep, feature_vjp(q, dq, PHI, F, FP), F, FP)
        tl.store(SC + rows, a, mask=keep)
        tl.store(SC + plane + rows, b, mask=keep)
        tl.store(SC + 2 * plane + rows, gamma, mask=keep)
        kw = cast(kh.to(tl.float32) * w[:, None], dtype)
        St += dot(tl.trans(vh), kw, PRECISION)
        s += tl.sum(kw.to(tl.float32), axis=0)
        u += tl.sum(v * w[:, None], axis=0)
        seen += tl.sum(w, axis=0)


@triton.jit
def causal_suffix(
    Q, QD, DO, SC, RT, N, H, NSPLIT, sq_b, sq_h, sq_n, sqd_b, sqd_h, sqd_n, sdo_b, sdo_h, sdo_n,
    PHI: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr,
    HAS_DEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (NSPLIT, B·H): R = Σ φ(q)ᵀ a g, Σ γ φ(q), Σ δ φ(q_den), Σ b g of one segment, in the layout of states."""
    sp = tl.program_id(0)
    bh = tl.program_id(1)
    b_ = (bh // H).to(tl.int64)
    h = bh % H
    dtype: tl.constexpr = Q.dtype.element_ty
    per = tl.cdiv(tl.cdiv(N, C), NSPLIT) * C
    lo = sp * per
    hi = tl.minimum(lo + per, N)
    plane = tl.num_programs(1).to(tl.int64) * N
    SC += bh.to(tl.int64) * N
    R = tl.zeros([FP, EP], tl.float32)
    x = tl.zeros([FP], tl.float32)
    xd = tl.zeros([FP], tl.float32)
    p = tl.zeros([EP], tl.float32)
    for start in range(lo, hi, C):
        rows = start + tl.arange(0, C)
        keep = rows < hi
        a = tl.load(SC + rows, mask=keep, other=0.0)
        b = tl.load(SC + plane + rows, mask=keep, other=0.0)
        gamma = tl.load(SC + 2 * plane + rows, mask=keep, other=0.0)
        phi = feature(load_rows(Q + b_ * sq_b + h * sq_h, rows, sq_n, keep, F, FP).to(tl.float32), keep, PHI, F, FP)
        g = load_rows(DO + b_ * sdo_b + h * sdo_h, rows, sdo_n, keep, E, EP).to(tl.float32)
        R += dot(tl.trans(cast(phi, dtype)), cast(a[:, None] * g, dtype), PRECISION)
        x += tl.sum(gamma[:, None] * phi, axis=0)
        p += tl.sum(b[:, None] * g, axis=0)
        if HAS_DEN:
            delta = tl.load(SC + 3 * plane + rows, mask=keep, other=0.0)
            qd = load_rows(QD + b_ * sqd_b + h * sqd_h, rows, sqd_n, keep, F, FP).to(tl.float32)
            xd += tl.sum(delta[:, None] * feature(qd, keep, PHI, F, FP), axis=0)
    at = RT + (bh.to(tl.int64) * NSPLIT + sp) * (FP * EP + 2 * FP + EP + 16)
    f = tl.arange(0, FP)
    e = tl.arange(0, EP)
    tl.store(at + f[:, None] * EP + e[None, :], R)
    tl.store(at + FP * EP + f, x)
    tl.store(at + FP * EP + FP + f, xd)
    tl.store(at + FP * EP + 2 * FP + e, p)


@triton.jit
def causal_backward_kv(
    Q, K, V, QD, KD, W, DO, DK, DV, DKD, SC, RT, N, H, NSPLIT,
    sq_b, sq_h, sq_n, sk_b, sk_h, sk_n, sv_b, sv_h, sv_n, sqd_b, sqd_h, sqd_n, skd_b, skd_h, skd_n,
    sw_b, sw_h, sdo_b, sdo_h, sdo_n, sdk_b, sdk_h, sdk_n, sdv_b, sdv_h, sdv_n, sdkd_b, sdkd_h, sdkd_n,
    PHI: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr,
    HAS_W: tl.constexpr, HAS_DEN: tl.constexpr, HAS_STATE: tl.constexpr, DO_K: tl.constexpr, DO_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (NSPLIT, B·H), a backward scan: ∂k and ∂k_den (DO_K), ∂v (DO_V). RT [B·H, NSPLIT, SIZE]: the sums over later
    segments. Wide heads take two launches, one for the keys and one for the values: both states do not fit."""
    sp = tl.program_id(0)
    bh = tl.program_id(1)
    b_ = (bh // H).to(tl.int64)
    h = bh % H
    dtype: tl.constexpr = Q.dtype.element_ty
    K += b_ * sk_b + h * sk_h
    V += b_ * sv_b + h * sv_h
    W += b_ * sw_b + h * sw_h
    per = tl.cdiv(tl.cdiv(N, C), NSPLIT) * C
    lo = sp * per
    hi = tl.minimum(lo + per, N)
    c = first_value(V, W, E, EP, HAS_W)
    f = tl.arange(0, FP)
    e = tl.arange(0, EP)
    r = tl.arange(0, C)
    R = tl.zeros([FP, EP], tl.float32)
    Rt = tl.zeros([EP, FP], tl.float32)
    x = tl.zeros([FP], tl.float32)
    xd = tl.zeros([FP], tl.float32)
    p = tl.zeros([EP], tl.float32)
    if HAS_STATE:
        at = RT + (bh.to(tl.int64) * NSPLIT + sp) * (FP * EP + 2 * FP + EP + 16)
        R = tl.load(at + f[:, None] * EP + e[None, :])
        Rt = tl.load(at + f[None, :] * EP + e[:, None])
        x = tl.load(at + FP * EP + f)
        xd = tl.load(at + FP * EP + FP + f)
        p = tl.load(at + FP * EP + 2 * FP + e)
    upper = r[:, None] <= r[None, :]
    plane = tl.num_programs(1).to(tl.int64) * N
    SC += bh.to(tl.int64) * N
    chunks = tl.cdiv(hi - lo, C)
    for i in range(0, chunks):
        rows = lo + (chunks - 1 - i) * C + r
        keep = rows < hi
        a = tl.load(SC + rows, mask=keep, other=0.0)
        b = tl.load(SC + plane + rows, mask=keep, other=0.0)
        gamma = tl.load(SC + 2 * plane + rows, mask=keep, other=0.0)
        phi_q = feature(load_rows(Q + b_ * sq_b + h * sq_h, rows, sq_n, keep, F, FP).to(tl.float32), keep, PHI, F, FP)
        g = load_rows(DO + b_ * sdo_b + h * sdo_h, rows, sdo_n, keep, E, EP).to(tl.float32)
        k = load_rows(K, rows, sk_n, keep, F, FP).to(tl.float32)
        phi_k, v, w = centred_keys(K, V, W, c, rows, keep, sk_n, sv_n, PHI, F, FP, E, EP, HAS_W)
        qh = cast(phi_q, dtype)
        kh = cast(phi_k, dtype)
        vh = cast(v, dtype)
        ga = cast(a[:, None] * g, dtype)
        if DO_V:
            # Products of the transposed score tile are built as k qᵀ, never by transposing q kᵀ.
            At = dot(kh, tl.trans(qh), PRECISION)
            Pt = tl.where(upper, a[None, :] * At + b[None, :], 0.0)
            dv = dot(cast(Pt, dtype), cast(g, dtype), PRECISION) + dot(kh, cast(R, dtype), PRECISION) + p[None, :]
            store_rows(DV + b_ * sdv_b + h * sdv_h, rows, sdv_n, keep, dv * w[:, None], E, EP)
            R += dot(tl.trans(qh), ga, PRECISION)
            p += tl.sum(b[:, None] * g, axis=0)
        if DO_K:
            Gt = dot(vh, tl.trans(cast(g, dtype)), PRECISION)
            dAt = tl.where(upper, a[None, :] * Gt + gamma[None, :], 0.0)
            dk = dot(cast(dAt, dtype), qh, PRECISION) + dot(vh, cast(Rt, dtype), PRECISION) + x[None, :]
            dk = feature_vjp(k, dk * w[:, None], PHI, F, FP)
            store_rows(DK + b_ * sdk_b + h * sdk_h, rows, sdk_n, keep, dk, F, FP)
            Rt += dot(tl.trans(ga), qh, PRECISION)
            x += tl.sum(gamma[:, None] * phi_q, axis=0)
        if DO_K and HAS_DEN:
            delta = tl.load(SC + 3 * plane + rows, mask=keep, other=0.0)
            qd = load_rows(QD + b_ * sqd_b + h * sqd_h, rows, sqd_n, keep, F, FP).to(tl.float32)
            kd = load_rows(KD + b_ * skd_b + h * skd_h, rows, skd_n, keep, F, FP).to(tl.float32)
            phi_qd = feature(qd, keep, PHI, F, FP)
            weights = tl.where(upper, tl.broadcast_to(delta[None, :], (C, C)), 0.0)
            dkd = dot(cast(weights, dtype), cast(phi_qd, dtype), PRECISION) + xd[None, :]
            dkd = feature_vjp(kd, dkd * w[:, None], PHI, F, FP)
            store_rows(DKD + b_ * sdkd_b + h * sdkd_h, rows, sdkd_n, keep, dkd, F, FP)
            xd += tl.sum(delta[:, None] * phi_qd, axis=0)
