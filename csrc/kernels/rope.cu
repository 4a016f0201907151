// Rotary position embedding, both conventions, in place or not.
#include "../include/megakit/abi.h"
#include "../include/megakit/vector.h"

namespace mk {

constexpr int kRopeThreads = 128;

// One block per token. A thread turns VEC pairs at a time: (a, b) -> (a cos - b sin, b cos + a sin).
template <class T, int VEC, bool INTERLEAVED>
__global__ __launch_bounds__(kRopeThreads) void rope(T* out, const T* x, const float* cos_table, const float* sin_table, int heads,
                                                     int dim, long long out_stride, long long x_stride, long long batch,
                                                     long long offset, float direction) {
  const int half_dim = dim / 2, units = half_dim / VEC;
  const long long token = blockIdx.x, row = (token / batch + offset) * half_dim;
  for (int n = threadIdx.x; MK_WITHIN(n, heads * units); n += kRopeThreads) {
    const int head = n / units, pair = (n - head * units) * VEC;
    const long long first = head * (long long)dim + (INTERLEAVED ? 2 * pair : pair);
    const long long second = first + (INTERLEAVED ? VEC : half_dim);
    const T* const from = x + token * x_stride;
    T* const to = out + token * out_stride;
    float lo[VEC], hi[VEC], c[VEC], s[VEC];
    load_floats(lo, from + first);
    load_floats(hi, from + second);
    load_fp32(c, cos_table + row + pair);
    load_fp32(s, sin_table + row + pair);
    if constexpr (INTERLEAVED && VEC > 1) {  // the pairs lie one after the other in lo and hi
      MK_UNROLL for (int i = 0; i < VEC; i++) {
        float(&at)[VEC] = i < VEC / 2 ? lo : hi;
        const int k = 2 * i % VEC;
        const float a = at[k], b = at[k + 1], turn = s[i] * direction;
        at[k] = a * c[i] - b * turn;
        at[k + 1] = b * c[i] + a * turn;
      }
    } else {
      MK_UNROLL for (int i = 0; i < VEC; i++) {
        const float a = lo[i], b = hi[i], turn = s[i] * direction;
        lo[i] = a * c[i] - b * turn;
        hi[i] = b * c[i] + a * turn;
      }
    }
    store_floats(to + first, lo);
    store_floats(to + second, hi);
  }
}

}  // namespace mk

MK_API int mk_rope(void* out, const void* x, const float* cos, const float* sin, int64_t tokens, int heads, int dim,
                   int64_t out_stride, int64_t x_stride, int64_t batch, int64_t offset, int interleaved, int inverse, int dtype,
                   void* stream) {
  if (dim < 2 || dim % 2 || heads < 1 || batch < 1) return mk::kBadSize;
  return mk::by_type(dtype, [&](auto t) {
    using T = decltype(t);
    constexpr int N = 16 / sizeof(T);
    const bool wide = dim / 2 % N == 0 && out_stride % N == 0 && x_stride % N == 0 && mk::aligned(out, x, cos, sin);
    return mk::by_width<T>(wide, [&](auto vec) {
      constexpr int VEC = decltype(vec)::value;
      const auto kernel = interleaved ? mk::rope<T, VEC, true> : mk::rope<T, VEC, false>;
      return mk::launch("rope", kernel, tokens, mk::kRopeThreads, (cudaStream_t)stream, (T*)out, (const T*)x, cos, sin, heads, dim,
                        (long long)out_stride, (long long)x_stride, (long long)batch, (long long)offset, inverse ? -1.f : 1.f);
    });
  });
}
