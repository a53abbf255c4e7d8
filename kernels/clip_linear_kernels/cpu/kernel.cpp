// Linear attention on the CPU: dispatch by instruction set at run time, parallel over heads and parts of them.
#include <cstdlib>

#include "problem.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define X86 1
namespace avx512 {
#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")))
#include "body.h"
#include "steps.h"
#include "causal.h"
#undef LANES
#undef TARGET
#undef FN
}  // namespace avx512
namespace avx2 {
#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#include "body.h"
#include "steps.h"
#include "causal.h"
#undef LANES
#undef TARGET
#undef FN
}  // namespace avx2
#endif
namespace portable {
#define LANES 4
#define TARGET
#include "body.h"
#include "steps.h"
#include "causal.h"
}  // namespace portable

namespace {

struct Set {
  const char* name;
  const Tasks* tasks;
};

Set best(int64_t wanted) {  // 0: the best there is; 1 portable, 2 AVX2, 3 AVX-512
#ifdef X86
  const bool two = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool five = two && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
  if (five && (wanted == 0 || wanted == 3)) return {"AVX-512", &avx512::tasks};
  if (two && (wanted == 0 || wanted >= 2)) return {"AVX2+FMA", &avx2::tasks};
#endif
  return {"portable", &portable::tasks};
}

void each(const Problem& p, const Sizes& z, Task task, int64_t parts) {
  const int64_t heads = p.B * p.H, count = heads * parts;
  if (p.threads <= 1 || count == 1) {
    for (int64_t i = 0; i < count; i++) task(p, z, i / parts, i % parts);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)p.threads)
  for (int64_t i = 0; i < count; i++) task(p, z, i / parts, i % parts);
}

// Sum the parts of every head into its first, in a fixed order.
void reduce(const Problem& p, const Sizes& z, float* first) {
  for (int64_t head = 0; head < p.B * p.H; head++) {
    float* to = first + head * z.splits * z.state;
    for (int64_t part = 1; part < z.splits; part++)
      for (int64_t i = 0; i < z.state; i++) to[i] += to[part * z.state + i];
  }
}

void run(const Problem& p, const Sizes& z, const Tasks& t) {
  if (p.causal) {
    each(p, z, p.backward ? t.causal_query : t.causal_forward, 1);
    if (p.backward) each(p, z, t.causal_key, 1);
    return;
  }
  if (z.splits == 1) {
    each(p, z, p.backward ? t.whole_backward : t.whole_forward, 1);
    return;
  }
  each(p, z, t.state, z.splits);
  reduce(p, z, p.workspace);
  if (!p.backward) {
    each(p, z, t.apply, z.splits);
    return;
  }
  each(p, z, t.query, z.splits);
  reduce(p, z, p.workspace + p.B * p.H * z.splits * z.state);
  each(p, z, t.key, z.splits);
}

// Memory of the states. Small ones are kept by the calling thread: fresh pages cost more than a short call.
struct Workspace {
  static constexpr size_t most_kept = size_t(8) << 20;
  void* data = nullptr;
  size_t bytes = 0;
  float* of(size_t wanted) {
    if (wanted > bytes) {
      std::free(data);
      data = std::aligned_alloc(64, wanted);
      bytes = data ? wanted : 0;
    }
    return static_cast<float*>(data);
  }
  void shrink() {
    if (bytes <= most_kept) return;
    std::free(data);
    data = nullptr, bytes = 0;
  }
  ~Workspace() { std::free(data); }
};

}  // namespace

extern "C" {

const char* clip_linear_isa(int64_t wanted) { return best(wanted).name; }

// 0, or 1 when there is no memory.
int clip_linear_attention(const Problem* problem) {
  Problem p = *problem;
  const Sizes z(p);
  const int64_t states = p.B * p.H * z.splits * z.state;
  const int64_t floats = p.backward ? 2 * states + (p.causal ? p.B * p.H * p.N * 4 : 0) : states;
  thread_local Workspace kept;
  p.workspace = kept.of((floats * 4 + 63) / 64 * 64);
  if (!p.workspace) return 1;
  run(p, z, *best(p.isa).tasks);
  kept.shrink();
  return 0;
}

}  // extern "C"
