// Runs the kernel on buffers of exactly the size that it may touch; compiled with address and undefined sanitizers.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernel.cpp"

struct Buffer {  // a [B, H, tokens, channels] tensor of its own, token-major
  std::vector<char> bytes;
  Rows rows;
  Buffer(int64_t B, int64_t H, int64_t N, int64_t C, bool half) : bytes(B * H * N * C * (half ? 2 : 4)) {
    rows = {bytes.data(), N * H * C, C, H * C};
    for (size_t i = 0; i < bytes.size() / (half ? 2 : 4); i++) {
      const float x = std::sin(0.7f * i) + 0.1f;
      uint32_t bits;
      __builtin_memcpy(&bits, &x, 4);
      if (half) reinterpret_cast<uint16_t*>(bytes.data())[i] = bits >> 16;
      else reinterpret_cast<uint32_t*>(bytes.data())[i] = bits;
    }
  }
};

int main() {
  const int64_t lengths[] = {1, 2, 63, 64, 65, 2100}, widths[] = {5, 16, 24, 128};
  int64_t seed = 0;
  for (int64_t isa = 0; isa < 3; isa++)
    for (int64_t N : lengths)
      for (int64_t F : widths)
        for (int causal = 0; causal < 2; causal++, seed++) {
          const int64_t B = N > 100 ? 1 : 2, H = 2, M = causal ? N : N + seed % 3, E = widths[seed % 4];
          const bool half = seed % 5 == 0, den = seed % 3 == 0, weighted = seed % 2 == 0;
          Buffer q(B, H, N, F, half), k(B, H, M, F, half), v(B, H, M, E, half), out(B, H, N, E, half);
          Buffer qd(B, H, N, F, half), kd(B, H, M, F, half), dq = q, dk = k, dv = v, dqd = qd, dkd = kd;
          for (Buffer* b : {&dq, &dk, &dv, &dqd, &dkd}) b->rows.data = b->bytes.data();
          std::vector<float> w(B * M), eps(B * H * N, 0.01f), dw(B * H * M);
          for (int64_t i = 0; i < B * M; i++) w[i] = i % 4 == 0 ? 0.0f : 1.5f;
          Problem p = {};
          p.isa = isa, p.threads = 2, p.B = B, p.H = H, p.N = N, p.M = M, p.F = F, p.E = E;
          p.feature = seed % 5, p.normaliser = seed % 8, p.causal = causal, p.half = half, p.scale = 0.3, p.eps = 0.01;
          p.q = q.rows, p.k = k.rows, p.v = v.rows, p.out = out.rows;
          p.dq = dq.rows, p.dk = dk.rows, p.dv = dv.rows;
          if (den) p.qd = qd.rows, p.kd = kd.rows, p.dqd = dqd.rows, p.dkd = dkd.rows;
          if (weighted) p.w = w.data(), p.w_batch = M, p.w_head = 0, p.dw = dw.data();
          if (seed % 7 == 0) p.eps_rows = eps.data(), p.eps_batch = H * N, p.eps_head = N, p.eps_token = 1;
          if (clip_linear_attention(&p)) return std::puts("no memory"), 1;
          p.backward = 1;
          if (clip_linear_attention(&p)) return std::puts("no memory"), 1;
        }
  std::puts("ok");
}
