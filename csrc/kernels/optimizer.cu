// AdamW over flat shards, and the squared norm of a flat buffer.
#include "../include/megakit/abi.h"
#include "../include/megakit/reduce.h"
#include "../include/megakit/vector.h"

namespace mk {

constexpr int kAdamThreads = 256;
constexpr int kEach = 4;  // elements of a thread, and of an access where it is wide

struct Shards {  // a kernel's parameters: 4 KiB at most
  MegakitShard shard[MEGAKIT_SHARDS];
  unsigned first[MEGAKIT_SHARDS + 1];  // block
};
static_assert(sizeof(Shards) < 3584);

struct Adam {
  float rest1, rest2, eps, inverse1, inverse_root2, grad_scale;  // rest: 1 - beta, in double and rounded once
};

template <class T, int VEC>
MK_DEVICE void adam(const MegakitShard& s, long long at, const Adam& k) {
  float w[VEC], m[VEC], v[VEC], g[VEC];
  load_floats(w, s.master + at);
  load_floats(m, s.exp_avg + at);
  load_floats(v, s.exp_avg_sq + at);
  load_floats(g, s.grad + at);
  MK_UNROLL for (int i = 0; i < VEC; i++) {
    g[i] *= k.grad_scale;
    w[i] -= s.decay * w[i];
    m[i] += k.rest1 * (g[i] - m[i]);
    v[i] += k.rest2 * (g[i] * g[i] - v[i]);
    w[i] -= s.lr * k.inverse1 * m[i] / (sqrtf(v[i]) * k.inverse_root2 + k.eps);
  }
  store_floats(s.master + at, w);
  store_floats(s.exp_avg + at, m);
  store_floats(s.exp_avg_sq + at, v);
  if (s.weights) store_floats(static_cast<T*>(s.weights) + at, w);
}

// Loshchilov & Hutter 2019, as torch computes it: decay, then the step of the bias-corrected moments.
template <class T, bool WIDE>
__global__ __launch_bounds__(kAdamThreads) void adamw(Shards shards, int count, Adam k) {
  int n = 0;
  while (n + 1 < count && blockIdx.x >= shards.first[n + 1]) n++;
  const MegakitShard& s = shards.shard[n];
  const long long at = ((long long)(blockIdx.x - shards.first[n]) * kAdamThreads + threadIdx.x) * kEach;
  if (WIDE && MK_WITHIN(at + kEach - 1, s.size)) {
    adam<T, kEach>(s, at, k);
  } else {
    for (long long i = at; i < at + kEach && MK_WITHIN(i, s.size); i++) adam<T, 1>(s, i, k);
  }
}

template <bool WIDE>
__global__ __launch_bounds__(kAdamThreads) void square_sum(double* part, const float* x, long long n) {
  MK_SHARED(double, warps, kAdamThreads / 32);
  double total = 0.0;
  for (long long at = ((long long)blockIdx.x * kAdamThreads + threadIdx.x) * kEach; at < n;
       at += (long long)gridDim.x * kAdamThreads * kEach) {
    float v[kEach] = {};
    if (WIDE && MK_WITHIN(at + kEach - 1, n)) {
      load_floats(v, x + at);
    } else {
      for (int i = 0; i < kEach && MK_WITHIN(at + i, n); i++) v[i] = load(x + at + i);
    }
    MK_UNROLL for (int i = 0; i < kEach; i++) total += double(v[i]) * double(v[i]);
  }
  total = block_reduce<Sum, kAdamThreads>(total, warps);
  if (threadIdx.x == 0) store(part + blockIdx.x, total);
}

}  // namespace mk

MK_API int mk_adamw(const MegakitShard* shards, int count, double beta1, double beta2, double eps, double correction1,
                    double correction2, double grad_scale, int dtype, void* stream) {
  if (count < 1 || count > MEGAKIT_SHARDS) return mk::kBadSize;
  mk::Shards all{};
  bool wide = true;
  long long blocks = 0;
  for (int i = 0; i < count; i++) {
    const MegakitShard& s = all.shard[i] = shards[i];
    const long long each = mk::kAdamThreads * mk::kEach;
    if (s.size < 1) return mk::kBadSize;
    wide = wide && mk::aligned(s.master, s.exp_avg, s.exp_avg_sq, s.grad, s.weights);
    all.first[i] = unsigned(blocks);
    blocks += (s.size + each - 1) / each;
    if (blocks > INT_MAX) return mk::kBadSize;
  }
  const mk::Adam k{float(1.0 - beta1), float(1.0 - beta2), float(eps), float(1.0 / correction1),
                   float(1.0 / std::sqrt(correction2)), float(grad_scale)};
  return mk::by_type(dtype, [&](auto t) {
    using T = decltype(t);
    const auto kernel = wide ? mk::adamw<T, true> : mk::adamw<T, false>;
    return mk::launch("adamw", kernel, blocks, mk::kAdamThreads, (cudaStream_t)stream, all, count, k);
  });
}

MK_API int mk_square_sum(double* part, const float* x, int64_t n, int blocks, void* stream) {
  if (n < 0 || blocks < 1) return mk::kBadSize;
  const auto kernel = mk::aligned(x) ? mk::square_sum<true> : mk::square_sum<false>;
  return mk::launch("square_sum", kernel, blocks, mk::kAdamThreads, (cudaStream_t)stream, part, x, (long long)n);
}
