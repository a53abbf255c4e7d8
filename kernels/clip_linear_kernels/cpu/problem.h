// One call of the primitive, as Python packs it (run.py) and every instruction set reads it (body.h).
#pragma once
#include <cstddef>
#include <cstdint>

struct Rows {  // a [B, H, tokens, channels] tensor whose channels are adjacent; strides in elements
  char* data;
  int64_t batch, head, token;
};

struct Problem {
  int64_t backward, isa, threads;
  int64_t B, H, N, M, F, E;
  int64_t feature, normaliser, causal, half;  // half: bfloat16 in and out, float32 inside
  Rows q, k, v, qd, kd;                       // qd.data = 0: the denominator has q and k
  Rows out;                                   // forward: the output; backward: its gradient
  Rows dq, dk, dv, dqd, dkd;
  float* w;  // weights of the keys, or 0
  int64_t w_batch, w_head;
  float* eps_rows;  // one eps per query, or 0
  int64_t eps_batch, eps_head, eps_token;
  float* dw;         // [B, H, M], or 0
  float* workspace;  // filled in by clip_linear_attention
  double scale, eps;
};

// Tokens of one block; scratch of a block stays in the first-level cache.
constexpr int64_t T = 64;

struct Sizes {
  int64_t F, E;        // padded to 16 channels
  int64_t state;       // floats of one state: S [F, E] | s [F] | s of the denominator [F] | u [E] | n
  int64_t splits;      // parts of the tokens that are summed up on their own
  int64_t per_part;    // tokens, a multiple of T
  explicit Sizes(const Problem& p) {
    F = (p.F + 15) / 16 * 16;
    E = (p.E + 15) / 16 * 16;
    state = F * E + 2 * F + E + 16;
    // Decided by the shape alone, never by the number of threads: the same bits on any machine.
    const int64_t longest = p.N > p.M ? p.N : p.M, rows = p.B * p.H;
    splits = longest < 2048 || rows >= 16 || p.causal ? 1 : (16 + rows - 1) / rows;
    if (splits > longest / 512 && splits > 1) splits = longest / 512;
    per_part = ((longest + T - 1) / T + splits - 1) / splits * T;
  }
};

using Task = void (*)(const Problem&, const Sizes&, int64_t head, int64_t part);

struct Tasks {  // what one instruction set brings
  Task whole_forward, whole_backward;  // a head from start to end
  Task state, apply, query, key;       // the four steps of a head that is cut into parts
  Task causal_forward, causal_query, causal_key;
};
