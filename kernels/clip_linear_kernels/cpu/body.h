// Included once per instruction set, inside its namespace, with LANES and TARGET defined. Notation of spec.py.
// GCC's vector types, so that one text serves AVX-512, AVX2 and everything else.

typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
#define FN TARGET static inline __attribute__((always_inline))

FN V load(const float* p) { V x; __builtin_memcpy(&x, p, sizeof x); return x; }
FN void store(float* p, V x) { __builtin_memcpy(p, &x, sizeof x); }
FN V splat(float x) { return x - V{}; }
template <int N>
TARGET static inline __attribute__((always_inline)) float sum_of(const float* a) {
  if constexpr (N == 1) return a[0];
  else {
    typedef float Half __attribute__((vector_size(2 * N)));
    Half x, y;
    __builtin_memcpy(&x, a, sizeof x);
    __builtin_memcpy(&y, a + N / 2, sizeof y);
    x += y;
    float half[N / 2];
    __builtin_memcpy(half, &x, sizeof x);
    return sum_of<N / 2>(half);
  }
}
FN float sum(V x) {
  float a[LANES];
  __builtin_memcpy(a, &x, sizeof x);
  return sum_of<LANES>(a);
}
FN float product(const float* a, const float* b, int64_t n) {
  V s = {};
  for (int64_t i = 0; i < n; i += LANES) s += load(a + i) * load(b + i);
  return sum(s);
}
FN void add_scaled(float* a, float x, const float* b, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) store(a + i, load(a + i) + x * load(b + i));
}
// a[:] += Σ_i x[i, :]
FN void add_rows(float* a, const float* x, int64_t ldx, int64_t rows, int64_t n) {
  for (int64_t c = 0; c < n; c += LANES) {
    V s = load(a + c);
    for (int64_t i = 0; i < rows; i++) s += load(x + i * ldx + c);
    store(a + c, s);
  }
}
FN V exponential(V x) {
  // 2^n · e^r with |r| ≤ ln 2 / 2 and a polynomial of degree 6: about one unit in the last place.
  x = x > 88.7f ? splat(88.7f) : x;
  x = x < -87.3f ? splat(-87.3f) : x;
  const V shift = splat(12582912.0f);
  const V n = (x * 1.44269504f + shift) - shift;
  const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  V y = splat(1.3888889e-3f);
  y = y * r + 8.3333333e-3f;
  y = y * r + 4.1666667e-2f;
  y = y * r + 1.6666667e-1f;
  y = y * r + 0.5f;
  y = y * r * r + r + 1.0f;
  const I bits = (__builtin_convertvector(n, I) + 127) << 23;
  return y * (V)bits;
}

// C[i, :] (+)= Σ_p A(p, i) B[p, :] for R rows and K vectors of columns, in registers.
template <int R, int K>
TARGET static inline __attribute__((always_inline)) void tile(
    const float* A, int64_t a_p, int64_t a_i, const float* B, int64_t ldb, int64_t P, float* C, int64_t ldc, bool add) {
  V c[R][K];
#pragma GCC unroll 8
  for (int i = 0; i < R; i++)
#pragma GCC unroll 4
    for (int j = 0; j < K; j++) c[i][j] = add ? load(C + i * ldc + j * LANES) : V{};
#pragma GCC unroll 4
  for (int64_t p = 0; p < P; p++) {
    V b[K];
#pragma GCC unroll 4
    for (int j = 0; j < K; j++) b[j] = load(B + p * ldb + j * LANES);
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) {
      const V x = splat(A[p * a_p + i * a_i]);
#pragma GCC unroll 4
      for (int j = 0; j < K; j++) c[i][j] += x * b[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; i++)
#pragma GCC unroll 4
    for (int j = 0; j < K; j++) store(C + i * ldc + j * LANES, c[i][j]);
}
template <int K>
TARGET static void columns(
    int64_t rows, const float* A, int64_t a_p, int64_t a_i, const float* B, int64_t ldb, int64_t P, float* C,
    int64_t ldc, bool add) {
  int64_t i = 0;
  for (; i + 6 <= rows; i += 6) tile<6, K>(A + i * a_i, a_p, a_i, B, ldb, P, C + i * ldc, ldc, add);
  for (; i + 2 <= rows; i += 2) tile<2, K>(A + i * a_i, a_p, a_i, B, ldb, P, C + i * ldc, ldc, add);
  for (; i < rows; i++) tile<1, K>(A + i * a_i, a_p, a_i, B, ldb, P, C + i * ldc, ldc, add);
}
TARGET static void gemm(
    int64_t rows, int64_t width, int64_t P, const float* A, int64_t a_p, int64_t a_i, const float* B, int64_t ldb,
    float* C, int64_t ldc, bool add) {
  constexpr int64_t most = LANES == 16 ? 4 : 2;  // 6 × 4 accumulators of 32 registers, or 6 × 2 of 16
  int64_t j = 0;
  for (; j + most * LANES <= width; j += most * LANES)
    columns<most>(rows, A, a_p, a_i, B + j, ldb, P, C + j, ldc, add);
  for (; j < width; j += LANES) columns<1>(rows, A, a_p, a_i, B + j, ldb, P, C + j, ldc, add);
}
FN void transpose(const float* x, int64_t ldx, int64_t rows, int64_t cols, float* y, int64_t ldy) {
  for (int64_t j = 0; j < cols; j += 8)
    for (int64_t i = 0; i < rows; i++)
      for (int64_t l = j; l < j + 8; l++) y[l * ldy + i] = x[i * ldx + l];
}

struct View {  // rows of float32, [count, width]
  const float* at;
  int64_t ld;
  TARGET const float* row(int64_t i) const { return at + i * ld; }
};

// Rows of one head as float32, [count, width] with zeros beyond the channels; asks for the rows that come next.
struct Head {
  const char* data;
  int64_t tokens, token, channels, width, bytes;
  bool direct;  // the rows in memory are what the kernel computes with
  TARGET Head(const Rows& x, const Problem& p, int64_t head, int64_t tokens, int64_t channels, int64_t width)
      : tokens(tokens), token(x.token), channels(channels), width(width), bytes(p.half ? 2 : 4),
        direct(bytes == 4 && channels == width) {
    data = x.data + (head / p.H * x.batch + head % p.H * x.head) * bytes;
  }
  TARGET float* row(int64_t i) const { return (float*)(data + i * token * bytes); }
  TARGET View view(int64_t first, int64_t count, float* scratch) const {
    if (direct) {
      ask(first + T);
      return {row(first), token};
    }
    read(first, count, scratch);
    return {scratch, width};
  }
  // Rows lie pages apart, where the processor does not look ahead by itself.
  TARGET void ask(int64_t first) const {
    const int64_t end = first + T < tokens ? first + T : tokens;
    for (int64_t i = first; i < end; i++)
      for (int64_t c = 0; c < channels * bytes; c += 64) __builtin_prefetch(data + i * token * bytes + c, 0, 2);
  }
  TARGET void read(int64_t first, int64_t count, float* to) const {
    ask(first + T);
    for (int64_t i = 0; i < count; i++, to += width) {
      const char* row = data + (first + i) * token * bytes;
      if (direct) {
        for (int64_t c = 0; c < width; c += LANES) store(to + c, load((const float*)row + c));
      } else if (bytes == 4) {
        __builtin_memcpy(to, row, channels * 4);
      } else {
        for (int64_t c = 0; c < channels; c++) {
          uint16_t h;
          __builtin_memcpy(&h, row + 2 * c, 2);
          const uint32_t bits = (uint32_t)h << 16;
          __builtin_memcpy(to + c, &bits, 4);
        }
      }
      for (int64_t c = channels; c < width; c++) to[c] = 0;
    }
  }
  // Where row i is computed: in place, or in ``scratch``, from where ``write`` takes it.
  TARGET float* place(int64_t i, float* scratch) const { return direct ? row(i) : scratch; }
  TARGET void write(int64_t i, const float* from) const {
    if (direct) return;
    char* row = const_cast<char*>(data) + i * token * bytes;
    if (bytes == 4) {
      __builtin_memcpy(row, from, channels * 4);
      return;
    }
    for (int64_t c = 0; c < channels; c++) {  // to nearest even; a NaN stays one
      uint32_t bits;
      __builtin_memcpy(&bits, from + c, 4);
      const uint16_t h = (bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 64 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
      __builtin_memcpy(row + 2 * c, &h, 2);
    }
  }
};

FN Head q_like(const Rows& x, const Problem& p, const Sizes& z, int64_t head) { return {x, p, head, p.N, p.F, z.F}; }
FN Head o_like(const Rows& x, const Problem& p, const Sizes& z, int64_t head) { return {x, p, head, p.N, p.E, z.E}; }
FN Head k_like(const Rows& x, const Problem& p, const Sizes& z, int64_t head) { return {x, p, head, p.M, p.F, z.F}; }
FN Head v_like(const Rows& x, const Problem& p, const Sizes& z, int64_t head) { return {x, p, head, p.M, p.E, z.E}; }

// φ in place; inverse norms of the rows for the derivative of l2. Padded channels stay zero.
TARGET static void apply_feature(int64_t code, float* x, int64_t count, int64_t channels, int64_t width, float* inverse) {
  for (int64_t i = 0; i < count; i++, x += width) {
    if (code == 1) {
      inverse[i] = 1.0f / __builtin_sqrtf(product(x, x, width) + 1e-12f);
      for (int64_t c = 0; c < width; c += LANES) store(x + c, load(x + c) * inverse[i]);
    } else if (code == 2) {
      for (int64_t c = 0; c < width; c += LANES) {
        const V y = load(x + c);
        store(x + c, y > 0.0f ? y + 1.0f : exponential(y > 0.0f ? V{} : y));
      }
    } else if (code == 3) {
      for (int64_t c = 0; c < width; c += LANES) store(x + c, load(x + c) > 0.0f ? load(x + c) : V{});
    } else if (code == 4) {
      for (int64_t c = 0; c < width; c += LANES) store(x + c, exponential(load(x + c)));
    }
    for (int64_t c = channels; c < width; c++) x[c] = 0;
  }
}
// to ← gᵀ ∂φ/∂x of one row, from φ(x).
FN void feature_vjp(int64_t code, const float* phi, float inverse, const float* g, float* to, int64_t width) {
  if (code == 1) {
    const float along = product(phi, g, width);
    for (int64_t c = 0; c < width; c += LANES) store(to + c, (load(g + c) - along * load(phi + c)) * inverse);
  } else if (code == 2) {
    for (int64_t c = 0; c < width; c += LANES) {
      const V y = load(phi + c);
      store(to + c, load(g + c) * (y > 1.0f ? splat(1.0f) : y));
    }
  } else if (code == 3) {
    for (int64_t c = 0; c < width; c += LANES) store(to + c, load(phi + c) > 0.0f ? load(g + c) : V{});
  } else if (code == 4) {
    for (int64_t c = 0; c < width; c += LANES) store(to + c, load(g + c) * load(phi + c));
  } else {
    for (int64_t c = 0; c < width; c += LANES) store(to + c, load(g + c));
  }
}

struct Slopes {
  float a, b, a_d, b_d, a_n, b_n;
};
FN Slopes coefficients(int64_t code, float d, float n, float scale, float eps) {
  float r, z, c;
  switch (code) {
    case 0: r = 1 / (d + n * eps); return {r, 0, -r * r, 0, -eps * r * r, 0};
    case 1: r = 1 / (d + eps); return {r, 0, -r * r, 0, 0, 0};
    case 2: r = 1 / (n + d); return {r, r, -r * r, -r * r, -r * r, -r * r};
    case 3: return {0.5f, 0.5f, 0, 0, 0, 0};
    case 4: return {0.5f / n, 0.5f / n, 0, 0, -0.5f / (n * n), -0.5f / (n * n)};
    case 5:
      c = scale / n; z = c * d; r = 1 / (z + eps);
      return {c * (1 + r), -z / n, -r * r * c * c, -c / n, -c / n * (1 + r - z * r * r), 2 * z / (n * n)};
    case 6:
      c = scale / n;
      return {c, (1 - c * d) / n, 0, -c / n, -c / n, (2 * c * d - 1) / (n * n)};
    default: return {1, 0, 0, 0, 0, 0};
  }
}

// Whether a and b do not depend on the query, so that their slopes are zero (∂n counts only where ∂w is wanted).
FN bool same_for_all(const Problem& p) { return p.normaliser == 3 || p.normaliser == 7 || (p.normaliser == 4 && !p.dw); }

struct Keys {  // what a block of keys is: φ(k), φ(k) w, v, w
  Head k, v, kd;
  const float* w;
  int64_t feature;
  TARGET Keys(const Problem& p, const Sizes& z, int64_t head)
      : k(k_like(p.k, p, z, head)), v(v_like(p.v, p, z, head)), kd(k_like(p.kd.data ? p.kd : p.k, p, z, head)),
        w(p.w ? p.w + head / p.H * p.w_batch + head % p.H * p.w_head : nullptr), feature(p.feature) {}
  TARGET float weight(int64_t j) const { return w ? w[j] : 1.0f; }
  TARGET View read(int64_t first, int64_t count, float* phi, float* inverse, float* values) const {
    k.read(first, count, phi);
    apply_feature(feature, phi, count, k.channels, k.width, inverse);
    if (!w) return v.view(first, count, values);
    v.read(first, count, values);
    for (int64_t j = 0; j < count; j++)  // what is masked may hold anything, even NaN
      if (w[first + j] == 0) {
        for (int64_t c = 0; c < k.width; c++) phi[j * k.width + c] = 0;
        for (int64_t c = 0; c < v.width; c++) values[j * v.width + c] = 0;
      }
    return {values, v.width};
  }
  TARGET void weigh(int64_t first, int64_t count, float* phi, int64_t width) const {
    if (!w) return;
    for (int64_t j = 0; j < count; j++)
      for (int64_t c = 0; c < width; c += LANES)
        store(phi + j * width + c, load(phi + j * width + c) * w[first + j]);
  }
};

struct State {  // pointers into one state
  float *S, *s, *sd, *u, *n;
  TARGET State(float* at, const Sizes& z)
      : S(at), s(at + z.F * z.E), sd(s + z.F), u(sd + z.F), n(u + z.E) {}
};

struct Eps {
  const float* rows;
  int64_t token;
  float same;
  TARGET Eps(const Problem& p, int64_t head)
      : rows(p.eps_rows ? p.eps_rows + head / p.H * p.eps_batch + head % p.H * p.eps_head : nullptr),
        token(p.eps_token), same((float)p.eps) {}
  TARGET float at(int64_t i) const { return rows ? rows[i * token] : same; }
};
