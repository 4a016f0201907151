// Dropout and residual add. The mask is a function of a seed and the element's index: it is never stored.
#include "../include/megakit/abi.h"
#include "../include/megakit/vector.h"

namespace mk {

constexpr int kDropoutThreads = 256;

struct Words {
  unsigned v[4];
};

// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
MK_DEVICE Words philox(unsigned long long counter, unsigned long long seed) {
  unsigned c[4] = {unsigned(counter), unsigned(counter >> 32), 0, 0};
  unsigned k0 = unsigned(seed), k1 = unsigned(seed >> 32);
  MK_UNROLL for (int round = 0; round < 10; round++) {
    const unsigned lo0 = 0xD2511F53u * c[0], hi0 = __umulhi(0xD2511F53u, c[0]);
    const unsigned lo1 = 0xCD9E8D57u * c[2], hi1 = __umulhi(0xCD9E8D57u, c[2]);
    c[0] = hi1 ^ c[1] ^ k0, c[1] = lo1, c[2] = hi0 ^ c[3] ^ k1, c[3] = lo0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c[0], c[1], c[2], c[3]}};
}

// A thread has 8 elements: two of the generator's results.
template <class T, bool WIDE>
__global__ __launch_bounds__(kDropoutThreads) void dropout(T* y, const T* x, const T* residual, long long n, unsigned threshold,
                                                           float scale, unsigned long long seed) {
  constexpr int EACH = 8, VEC = WIDE ? 16 / sizeof(T) : 1;
  const long long first = ((long long)blockIdx.x * kDropoutThreads + threadIdx.x) * EACH;
  bool keep[EACH];
  MK_UNROLL for (int i = 0; i < EACH; i += 4) {
    const Words words = philox((unsigned long long)(first + i) / 4, seed);
    MK_UNROLL for (int j = 0; j < 4; j++) keep[i + j] = words.v[j] >= threshold;
  }
  MK_UNROLL for (int i = 0; i < EACH; i += VEC) {
    if (MK_WITHIN(first + i, n)) {
      float v[VEC], r[VEC] = {};
      load_floats(v, x + first + i);
      if (residual) load_floats(r, residual + first + i);
      MK_UNROLL for (int j = 0; j < VEC; j++) v[j] = r[j] + (keep[i + j] ? v[j] * scale : 0.f);
      store_floats(y + first + i, v);
    }
  }
}

}  // namespace mk

MK_API int mk_dropout(void* y, const void* x, const void* residual, int64_t n, float p, uint64_t seed, int dtype, void* stream) {
  if (n < 0 || !(p >= 0.f && p < 1.f)) return mk::kBadSize;
  return mk::by_type(dtype, [&](auto t) {
    using T = decltype(t);
    const bool wide = n % (16 / int(sizeof(T))) == 0 && mk::aligned(y, x, residual);
    const auto kernel = wide ? mk::dropout<T, true> : mk::dropout<T, false>;
    const long long each = mk::kDropoutThreads * 8;
    return mk::launch("dropout", kernel, (n + each - 1) / each, mk::kDropoutThreads, (cudaStream_t)stream, (T*)y, (const T*)x,
                      (const T*)residual, (long long)n, unsigned(p * 4294967296.0), float(1.0 / (1.0 - p)),
                      (unsigned long long)seed);
  });
}
