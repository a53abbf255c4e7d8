// The non-causal steps, on the tools of body.h; formulas in lean.py. Blocks of T tokens; every scratch row is padded.

struct Range {
  int64_t lo, hi;
  TARGET Range(const Sizes& z, int64_t part, int64_t length)
      : lo(part * z.per_part), hi(lo + z.per_part < length ? lo + z.per_part : length) {}
};

// The state of the keys lo..hi, added up into ``at``.
TARGET static void add_state(const Problem& p, const Sizes& z, int64_t head, Range r, float* at) {
  const Keys keys(p, z, head);
  State st(at, z);
  alignas(64) float phi[T * 128], values[T * 128], inverse[T];
  for (int64_t i = 0; i < z.state; i++) at[i] = 0;
  for (int64_t j = r.lo; j < r.hi; j += T) {
    const int64_t t = r.hi - j < T ? r.hi - j : T;
    const View v = keys.read(j, t, phi, inverse, values);
    keys.weigh(j, t, phi, z.F);
    if (keys.w) {
      for (int64_t i = 0; i < t; i++) {
        *st.n += keys.w[j + i];
        add_scaled(st.u, keys.w[j + i], v.row(i), z.E);
      }
    } else {
      *st.n += t;
      add_rows(st.u, v.at, v.ld, t, z.E);
    }
    add_rows(st.s, phi, z.F, t, z.F);
    gemm(p.F, z.E, t, phi, z.F, 1, v.at, v.ld, st.S, z.E, true);
    if (!p.kd.data) continue;
    keys.kd.read(j, t, phi);
    apply_feature(p.feature, phi, t, p.F, z.F, inverse);
    for (int64_t i = 0; i < t; i++)
      if (keys.weight(j + i) != 0) add_scaled(st.sd, keys.weight(j + i), phi + i * z.F, z.F);
  }
}

TARGET static void apply_state(const Problem& p, const Sizes& z, int64_t head, Range r, float* at) {
  const Head q = q_like(p.q, p, z, head), qd = q_like(p.qd.data ? p.qd : p.q, p, z, head), out = o_like(p.out, p, z, head);
  const Eps eps(p, head);
  const State st(at, z);
  const float n = *st.n > 0 ? *st.n : 1.0f;
  const bool same = same_for_all(p);
  alignas(64) float phi[T * 128], y[T * 128], d[T], inverse[T];
  for (int64_t j = r.lo; j < r.hi; j += T) {
    const int64_t t = r.hi - j < T ? r.hi - j : T;
    q.read(j, t, phi);
    apply_feature(p.feature, phi, t, p.F, z.F, inverse);
    gemm(t, z.E, p.F, phi, 1, z.F, st.S, z.E, y, z.E, false);
    if (p.qd.data) {
      qd.read(j, t, phi);
      apply_feature(p.feature, phi, t, p.F, z.F, inverse);
    }
    for (int64_t i = 0; i < t; i++) d[i] = same ? 0.0f : product(phi + i * z.F, p.qd.data ? st.sd : st.s, z.F);
    for (int64_t i = 0; i < t; i++) {
      const Slopes c = coefficients(p.normaliser, d[i], n, (float)p.scale, eps.at(j + i));
      float *row = y + i * z.E, *to = out.place(j + i, row);
      for (int64_t e = 0; e < z.E; e += LANES) store(to + e, c.a * load(row + e) + c.b * load(st.u + e));
      out.write(j + i, to);
    }
  }
}

// Gradients by q of the queries lo..hi, and their sums ∂S, ∂s, ∂u, ∂n into ``sums``, laid out like a state.
TARGET static void query_gradient(const Problem& p, const Sizes& z, int64_t head, Range r, float* at, float* sums) {
  const Head q = q_like(p.q, p, z, head), qd = q_like(p.qd.data ? p.qd : p.q, p, z, head), grad = o_like(p.out, p, z, head);
  const Head dq = q_like(p.dq, p, z, head), dqd = q_like(p.qd.data ? p.dqd : p.dq, p, z, head);
  const Eps eps(p, head);
  const State st(at, z);
  State ds(sums, z);
  const float n = *st.n > 0 ? *st.n : 1.0f;
  const bool same = same_for_all(p);
  alignas(64) float phi[T * 128], phid[T * 128], g[T * 128], h[T * 128], inverse[T], inversed[T];
  alignas(64) float St[128 * 128];
  transpose(st.S, z.E, p.F, z.E, St, z.F);
  for (int64_t e = 0; e < z.E; e++)
    for (int64_t f = p.F; f < z.F; f++) St[e * z.F + f] = 0;
  for (int64_t i = 0; i < z.state; i++) sums[i] = 0;
  for (int64_t j = r.lo; j < r.hi; j += T) {
    const int64_t t = r.hi - j < T ? r.hi - j : T;
    q.read(j, t, phi);
    apply_feature(p.feature, phi, t, p.F, z.F, inverse);
    if (p.qd.data) {
      qd.read(j, t, phid);
      apply_feature(p.feature, phid, t, p.F, z.F, inversed);
    }
    const View given = grad.view(j, t, g);  // g: a ∂o
    gemm(t, z.F, p.E, given.at, 1, given.ld, St, z.F, h, z.F, false);
    for (int64_t i = 0; i < t; i++) {
      float *x = phi + i * z.F, *xd = p.qd.data ? phid + i * z.F : x, *hi = h + i * z.F, *gi = g + i * z.E, *to;
      const float along = same ? 0.0f : product(hi, x, z.F), gu = same ? 0.0f : product(given.row(i), st.u, z.E);
      const float d = same ? 0.0f : product(xd, p.qd.data ? st.sd : st.s, z.F);
      const Slopes c = coefficients(p.normaliser, d, n, (float)p.scale, eps.at(j + i));
      const float delta = c.a_d * along + c.b_d * gu;
      *ds.n += c.a_n * along + c.b_n * gu;
      add_scaled(ds.u, c.b, given.row(i), z.E);
      if (!same) add_scaled(p.qd.data ? ds.sd : ds.s, delta, xd, z.F);
      for (int64_t f = 0; f < z.F; f += LANES) {
        const V more = p.qd.data || same ? V{} : delta * load(st.s + f);
        store(hi + f, c.a * load(hi + f) + more);
      }
      for (int64_t e = 0; e < z.E; e += LANES) store(gi + e, c.a * load(given.row(i) + e));
      feature_vjp(p.feature, x, inverse[i], hi, to = dq.place(j + i, hi), z.F);
      dq.write(j + i, to);
      if (!p.qd.data) continue;
      for (int64_t f = 0; f < z.F; f += LANES) store(hi + f, delta * load(st.sd + f));
      feature_vjp(p.feature, xd, inversed[i], hi, to = dqd.place(j + i, hi), z.F);
      dqd.write(j + i, to);
    }
    gemm(p.F, z.E, t, phi, z.F, 1, g, z.E, ds.S, z.E, true);
  }
}

TARGET static void key_gradient(const Problem& p, const Sizes& z, int64_t head, Range r, float* at, float* sums) {
  const Keys keys(p, z, head);
  const Head dk = k_like(p.dk, p, z, head), dv = v_like(p.dv, p, z, head), dkd = k_like(p.kd.data ? p.dkd : p.dk, p, z, head);
  const State st(at, z), ds(sums, z);
  alignas(64) float phi[T * 128], values[T * 128], gk[T * 128], gv[T * 128], inverse[T];
  alignas(64) float St[128 * 128];
  transpose(ds.S, z.E, p.F, z.E, St, z.F);
  for (int64_t e = 0; e < z.E; e++)
    for (int64_t f = p.F; f < z.F; f++) St[e * z.F + f] = 0;
  float* dw = p.dw ? p.dw + head * p.M : nullptr;
  for (int64_t j = r.lo; j < r.hi; j += T) {
    const int64_t t = r.hi - j < T ? r.hi - j : T;
    const View v = keys.read(j, t, phi, inverse, values);
    gemm(t, z.F, p.E, v.at, 1, v.ld, St, z.F, gk, z.F, false);
    gemm(t, z.E, p.F, phi, 1, z.F, ds.S, z.E, gv, z.E, false);
    for (int64_t i = 0; i < t; i++) {
      const float w = keys.weight(j + i);
      float *x = phi + i * z.F, *a = gk + i * z.F, *b = gv + i * z.E, *to = dv.place(j + i, b);
      if (!p.kd.data) add_scaled(a, 1.0f, ds.s, z.F);
      if (dw) dw[j + i] = product(x, a, z.F) + product(v.row(i), ds.u, z.E) + (*st.n > 0 ? *ds.n : 0.0f);
      if (keys.w)
        for (int64_t f = 0; f < z.F; f += LANES) store(a + f, w * load(a + f));
      for (int64_t e = 0; e < z.E; e += LANES) store(to + e, w * (load(b + e) + load(ds.u + e)));
      dv.write(j + i, to);
      feature_vjp(p.feature, x, inverse[i], a, to = dk.place(j + i, a), z.F);
      dk.write(j + i, to);
    }
    if (!p.kd.data) continue;
    keys.kd.read(j, t, phi);
    apply_feature(p.feature, phi, t, p.F, z.F, inverse);
    for (int64_t i = 0; i < t; i++) {
      float *x = phi + i * z.F, *a = gk + i * z.F;
      if (dw) dw[j + i] += product(x, ds.sd, z.F);
      for (int64_t f = 0; f < z.F; f += LANES) store(a + f, keys.weight(j + i) * load(ds.sd + f));
      float* to = dkd.place(j + i, a);
      feature_vjp(p.feature, x, inverse[i], a, to, z.F);
      dkd.write(j + i, to);
    }
  }
}

// Workspace: states [heads, splits], then their gradients [heads, splits].
FN float* state_of(const Problem& p, const Sizes& z, int64_t head, int64_t part) {
  return p.workspace + (head * z.splits + part) * z.state;
}
FN float* sums_of(const Problem& p, const Sizes& z, int64_t head, int64_t part) {
  return state_of(p, z, p.B * p.H + head, part);
}
TARGET static void whole_forward(const Problem& p, const Sizes& z, int64_t head, int64_t) {
  add_state(p, z, head, Range(z, 0, p.M), state_of(p, z, head, 0));
  apply_state(p, z, head, Range(z, 0, p.N), state_of(p, z, head, 0));
}
TARGET static void whole_backward(const Problem& p, const Sizes& z, int64_t head, int64_t) {
  float *st = state_of(p, z, head, 0), *ds = sums_of(p, z, head, 0);
  add_state(p, z, head, Range(z, 0, p.M), st);
  query_gradient(p, z, head, Range(z, 0, p.N), st, ds);
  key_gradient(p, z, head, Range(z, 0, p.M), st, ds);
}
TARGET static void part_state(const Problem& p, const Sizes& z, int64_t head, int64_t part) {
  add_state(p, z, head, Range(z, part, p.M), state_of(p, z, head, part));
}
TARGET static void part_apply(const Problem& p, const Sizes& z, int64_t head, int64_t part) {
  apply_state(p, z, head, Range(z, part, p.N), state_of(p, z, head, 0));
}
TARGET static void part_query(const Problem& p, const Sizes& z, int64_t head, int64_t part) {
  query_gradient(p, z, head, Range(z, part, p.N), state_of(p, z, head, 0), sums_of(p, z, head, part));
}
TARGET static void part_key(const Problem& p, const Sizes& z, int64_t head, int64_t part) {
  key_gradient(p, z, head, Range(z, part, p.M), state_of(p, z, head, 0), sums_of(p, z, head, 0));
}
