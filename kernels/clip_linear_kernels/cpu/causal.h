// The causal steps, on the tools of body.h: chunks of T tokens; formulas in lean_causal.py. Parallel over heads.

// Lower triangle (with diagonal) of X Yᵀ, given Y transposed with T columns; X [t, width], only what is used is computed.
TARGET static void lower_product(int64_t t, const float* X, int64_t width, int64_t ldx, const float* Yt, float* A) {
  for (int64_t i = 0; i < t; i += 16) {
    const int64_t rows = t - i < 16 ? t - i : 16;
    gemm(rows, i + 16, width, X + i * ldx, 1, ldx, Yt, T, A + i * T, T, false);
    for (int64_t a = i; a < i + rows; a++)
      for (int64_t b = a + 1; b < i + 16; b++) A[a * T + b] = 0;
  }
}
// C (+)= A B with A lower triangular.
TARGET static void lower_times(int64_t t, const float* A, View B, int64_t width, float* C, bool add) {
  for (int64_t i = 0; i < t; i += 16) {
    const int64_t rows = t - i < 16 ? t - i : 16;
    gemm(rows, width, i + rows, A + i * T, 1, T, B.at, B.ld, C + i * width, width, add);
  }
}
// C (+)= Aᵀ B with A lower triangular.
TARGET static void lower_transposed_times(int64_t t, const float* A, const float* B, int64_t width, float* C, bool add) {
  for (int64_t j = 0; j < t; j += 16) {
    const int64_t rows = t - j < 16 ? t - j : 16;
    gemm(rows, width, t - j, A + j * T + j, T, 1, B + j * width, width, C + j * width, width, add);
  }
}
TARGET static void transposed_rows(View x, int64_t t, int64_t width, float* y) {
  transpose(x.at, x.ld, t, width, y, T);
  for (int64_t c = 0; c < width; c++)
    for (int64_t i = t; i < T; i++) y[c * T + i] = 0;
}

TARGET static void causal_forward(const Problem& p, const Sizes& z, int64_t head, int64_t) {
  const Keys keys(p, z, head);
  const Head q = q_like(p.q, p, z, head), qd = q_like(p.qd.data ? p.qd : p.q, p, z, head), out = o_like(p.out, p, z, head);
  const Eps eps(p, head);
  float* at = state_of(p, z, head, 0);
  State st(at, z);
  for (int64_t i = 0; i < z.state; i++) at[i] = 0;
  alignas(64) float x[T * 128], k[T * 128], xd[T * 128], kd[T * 128], values[T * 128], y[T * 128], kt[128 * T], A[T * T];
  float inverse[T];
  for (int64_t j = 0; j < p.N; j += T) {
    const int64_t t = p.N - j < T ? p.N - j : T;
    q.read(j, t, x);
    apply_feature(p.feature, x, t, p.F, z.F, inverse);
    const View v = keys.read(j, t, k, inverse, values);
    keys.weigh(j, t, k, z.F);
    if (p.qd.data) {
      qd.read(j, t, xd);
      apply_feature(p.feature, xd, t, p.F, z.F, inverse);
      keys.kd.read(j, t, kd);
      apply_feature(p.feature, kd, t, p.F, z.F, inverse);
      keys.weigh(j, t, kd, z.F);
    }
    transposed_rows({k, z.F}, t, z.F, kt);
    lower_product(t, x, p.F, z.F, kt, A);
    gemm(t, z.E, p.F, x, 1, z.F, st.S, z.E, y, z.E, false);
    lower_times(t, A, v, z.E, y, true);
    for (int64_t i = 0; i < t; i++) {
      const float w = keys.weight(j + i);
      *st.n += w;
      add_scaled(st.u, w, v.row(i), z.E);
      add_scaled(st.s, 1.0f, (p.qd.data ? kd : k) + i * z.F, z.F);
      const float d = product((p.qd.data ? xd : x) + i * z.F, st.s, z.F);
      const Slopes c = coefficients(p.normaliser, d, *st.n > 0 ? *st.n : 1.0f, (float)p.scale, eps.at(j + i));
      float *row = y + i * z.E, *to = out.place(j + i, row);
      for (int64_t e = 0; e < z.E; e += LANES) store(to + e, c.a * load(row + e) + c.b * load(st.u + e));
      out.write(j + i, to);
    }
    gemm(p.F, z.E, t, k, z.F, 1, v.at, v.ld, st.S, z.E, true);
  }
}

// Four numbers per query that the keys need: a, b, δ, ∂n. Behind the states in the workspace.
FN float* scalars_of(const Problem& p, const Sizes& z, int64_t head) {
  return state_of(p, z, 2 * p.B * p.H, 0) + head * p.N * 4;
}

TARGET static void causal_query(const Problem& p, const Sizes& z, int64_t head, int64_t) {
  const Keys keys(p, z, head);
  const Head q = q_like(p.q, p, z, head), qd = q_like(p.qd.data ? p.qd : p.q, p, z, head), grad = o_like(p.out, p, z, head);
  const Head dq = q_like(p.dq, p, z, head), dqd = q_like(p.qd.data ? p.dqd : p.dq, p, z, head);
  const Eps eps(p, head);
  float *at = state_of(p, z, head, 0), *scalars = scalars_of(p, z, head);
  State st(at, z);  // S is kept transposed here: [E, F]
  for (int64_t i = 0; i < z.state; i++) at[i] = 0;
  alignas(64) float x[T * 128], k[T * 128], xd[T * 128], kd[T * 128], values[T * 128], g[T * 128], h[T * 128];
  alignas(64) float vt[128 * T], G[T * T];
  float inverse[T], inversed[T], ignored[T];
  for (int64_t j = 0; j < p.N; j += T) {
    const int64_t t = p.N - j < T ? p.N - j : T;
    q.read(j, t, x);
    apply_feature(p.feature, x, t, p.F, z.F, inverse);
    const View v = keys.read(j, t, k, ignored, values);
    keys.weigh(j, t, k, z.F);
    grad.read(j, t, g);
    if (p.qd.data) {
      qd.read(j, t, xd);
      apply_feature(p.feature, xd, t, p.F, z.F, inversed);
      keys.kd.read(j, t, kd);
      apply_feature(p.feature, kd, t, p.F, z.F, ignored);
      keys.weigh(j, t, kd, z.F);
    }
    transposed_rows(v, t, z.E, vt);
    lower_product(t, g, p.E, z.E, vt, G);
    gemm(t, z.F, p.E, g, 1, z.E, st.S, z.F, h, z.F, false);
    lower_times(t, G, {k, z.F}, z.F, h, true);
    for (int64_t i = 0; i < t; i++) {
      float *xi = x + i * z.F, *xdi = p.qd.data ? xd + i * z.F : xi, *hi = h + i * z.F, *gi = g + i * z.E, *to;
      const float w = keys.weight(j + i);
      *st.n += w;
      add_scaled(st.u, w, v.row(i), z.E);
      add_scaled(st.s, 1.0f, (p.qd.data ? kd : k) + i * z.F, z.F);
      const float along = product(hi, xi, z.F), gu = product(gi, st.u, z.E), d = product(xdi, st.s, z.F);
      const Slopes c = coefficients(p.normaliser, d, *st.n > 0 ? *st.n : 1.0f, (float)p.scale, eps.at(j + i));
      const float delta = c.a_d * along + c.b_d * gu;
      float* kept = scalars + (j + i) * 4;
      kept[0] = c.a, kept[1] = c.b, kept[2] = delta;
      kept[3] = *st.n > 0 ? c.a_n * along + c.b_n * gu : 0.0f;
      for (int64_t f = 0; f < z.F; f += LANES) {
        const V more = p.qd.data ? V{} : delta * load(st.s + f);
        store(hi + f, c.a * load(hi + f) + more);
      }
      feature_vjp(p.feature, xi, inverse[i], hi, to = dq.place(j + i, hi), z.F);
      dq.write(j + i, to);
      if (!p.qd.data) continue;
      for (int64_t f = 0; f < z.F; f += LANES) store(hi + f, delta * load(st.s + f));
      feature_vjp(p.feature, xdi, inversed[i], hi, to = dqd.place(j + i, hi), z.F);
      dqd.write(j + i, to);
    }
    gemm(p.E, z.F, t, v.at, v.ld, 1, k, z.F, st.S, z.F, true);
  }
}

TARGET static void causal_key(const Problem& p, const Sizes& z, int64_t head, int64_t) {
  const Keys keys(p, z, head);
  const Head q = q_like(p.q, p, z, head), qd = q_like(p.qd.data ? p.qd : p.q, p, z, head), grad = o_like(p.out, p, z, head);
  const Head dk = k_like(p.dk, p, z, head), dv = v_like(p.dv, p, z, head), dkd = k_like(p.kd.data ? p.dkd : p.dk, p, z, head);
  float *at = state_of(p, z, head, 0), *Rt = sums_of(p, z, head, 0);
  const float* scalars = scalars_of(p, z, head);
  State later(at, z);  // R [F, E] and, in the other half of the workspace, its transpose; Σ δ φ(q), Σ b g, Σ ∂n
  for (int64_t i = 0; i < z.state; i++) at[i] = Rt[i] = 0;
  alignas(64) float x[T * 128], xd[T * 128], k[T * 128], values[T * 128], g[T * 128], gk[T * 128], gv[T * 128];
  alignas(64) float t1[128 * T], A[T * T];
  float inverse[T], ignored[T];
  float* dw = p.dw ? p.dw + head * p.M : nullptr;
  for (int64_t j = (p.N - 1) / T * T; j >= 0; j -= T) {
    const int64_t t = p.N - j < T ? p.N - j : T;
    q.read(j, t, x);
    apply_feature(p.feature, x, t, p.F, z.F, ignored);
    const View v = keys.read(j, t, k, inverse, values);
    grad.read(j, t, g);
    if (p.qd.data) {
      qd.read(j, t, xd);
      apply_feature(p.feature, xd, t, p.F, z.F, ignored);
    }
    for (int64_t i = 0; i < t; i++)
      for (int64_t e = 0; e < z.E; e += LANES)
        store(g + i * z.E + e, scalars[(j + i) * 4] * load(g + i * z.E + e));  // a g
    transposed_rows(v, t, z.E, t1);
    lower_product(t, g, p.E, z.E, t1, A);
    gemm(t, z.F, p.E, v.at, 1, v.ld, Rt, z.F, gk, z.F, false);
    lower_transposed_times(t, A, x, z.F, gk, true);
    transposed_rows({k, z.F}, t, z.F, t1);
    lower_product(t, x, p.F, z.F, t1, A);
    gemm(t, z.E, p.F, k, 1, z.F, later.S, z.E, gv, z.E, false);
    lower_transposed_times(t, A, g, z.E, gv, true);
    gemm(p.F, z.E, t, x, z.F, 1, g, z.E, later.S, z.E, true);
    gemm(p.E, z.F, t, g, z.E, 1, x, z.F, Rt, z.F, true);
    grad.read(j, t, g);
    for (int64_t i = t - 1; i >= 0; i--) {
      const float w = keys.weight(j + i), *kept = scalars + (j + i) * 4;
      float *ki = k + i * z.F, *a = gk + i * z.F, *b = gv + i * z.E, *to = dv.place(j + i, b);
      *later.n += kept[3];
      add_scaled(later.u, kept[1], g + i * z.E, z.E);
      add_scaled(later.s, kept[2], (p.qd.data ? xd : x) + i * z.F, z.F);
      if (!p.qd.data) add_scaled(a, 1.0f, later.s, z.F);
      if (dw) dw[j + i] = product(ki, a, z.F) + product(v.row(i), later.u, z.E) + *later.n;
      for (int64_t f = 0; f < z.F; f += LANES) store(a + f, w * load(a + f));
      for (int64_t e = 0; e < z.E; e += LANES) store(to + e, w * (load(b + e) + load(later.u + e)));
      dv.write(j + i, to);
      feature_vjp(p.feature, ki, inverse[i], a, to = dk.place(j + i, a), z.F);
      dk.write(j + i, to);
      if (p.qd.data) __builtin_memcpy(xd + i * z.F, later.s, z.F * 4);  // Σ_{i' ≥ i} δ φ(q_den), for the loop below
    }
    if (!p.qd.data) continue;
    keys.kd.read(j, t, k);
    apply_feature(p.feature, k, t, p.F, z.F, inverse);
    for (int64_t i = 0; i < t; i++) {
      float *ki = k + i * z.F, *a = xd + i * z.F;
      if (dw) dw[j + i] += product(ki, a, z.F);
      for (int64_t f = 0; f < z.F; f += LANES) store(a + f, keys.weight(j + i) * load(a + f));
      float* to = dkd.place(j + i, a);
      feature_vjp(p.feature, ki, inverse[i], a, to, z.F);
      dkd.write(j + i, to);
    }
  }
}

static const Tasks tasks = {whole_forward, whole_backward, part_state,   part_apply, part_query,
                            part_key,      causal_forward, causal_query, causal_key};
