// Softmax of scaled scores, causal or masked.
#include "../include/megakit/abi.h"
#include "../include/megakit/reduce.h"
#include "../include/megakit/rows.h"
#include "../include/megakit/vector.h"

namespace mk {

// One block per query and head. Scores that a query doesn't see are not read where a whole access is of them.
template <class T, int VEC, int THREADS, int ELEMENTS>
__global__ __launch_bounds__(THREADS) void softmax_forward(T* y, const T* x, const uint8_t* allowed, int heads, int queries,
                                                           int keys, float scale, int causal) {
  constexpr int STEPS = ELEMENTS / VEC;
  MK_SHARED(float, part, THREADS / 32);
  const long long row = blockIdx.x;
  const int query = int(row % queries);
  const int seen = causal ? query + 1 + keys - queries : keys;  // at most as many keys from the first on
  const uint8_t* const mask = allowed ? allowed + (row / queries / heads * queries + query) * keys : nullptr;
  float p[STEPS][VEC];
  float max = -INFINITY;
  MK_UNROLL for (int k = 0; k < STEPS; k++) {
    const int c = (k * THREADS + int(threadIdx.x)) * VEC;
    MK_UNROLL for (int i = 0; i < VEC; i++) p[k][i] = -INFINITY;
    if (MK_WITHIN(c, seen)) {
      float z[VEC];
      load_floats(z, x + row * keys + c);
      Vec<uint8_t, VEC> m;
      if (mask) m = load<uint8_t, VEC>(mask + c);
      MK_UNROLL for (int i = 0; i < VEC; i++) {
        if (MK_WITHIN(c + i, seen) && (!mask || m.v[i])) p[k][i] = z[i] * scale;
        max = fmaxf(max, p[k][i]);
      }
    }
  }
  max = block_reduce<Max, THREADS>(max, part);
  float total = 0.f;
  MK_UNROLL for (int k = 0; k < STEPS; k++) {
    MK_UNROLL for (int i = 0; i < VEC; i++) {
      p[k][i] = p[k][i] == -INFINITY ? 0.f : expf(p[k][i] - max);
      total += p[k][i];
    }
  }
  total = block_reduce<Sum, THREADS>(total, part);
  const float inverse = total == 0.f ? 0.f : 1.f / total;  // a query that sees nothing; a NaN goes to the whole row
  MK_UNROLL for (int k = 0; k < STEPS; k++) {
    const int c = (k * THREADS + int(threadIdx.x)) * VEC;
    if (MK_WITHIN(c, keys)) {
      MK_UNROLL for (int i = 0; i < VEC; i++) p[k][i] *= inverse;
      store_floats(y + row * keys + c, p[k]);
    }
  }
}

// dx = scale y (dy - sum(dy y))
template <class T, int VEC, int THREADS, int ELEMENTS>
__global__ __launch_bounds__(THREADS, 1) void softmax_backward(T* dx, const T* dy, const T* y, int keys, float scale) {
  constexpr int STEPS = ELEMENTS / VEC;
  MK_SHARED(float, part, THREADS / 32);
  const long long row = (long long)blockIdx.x * keys;
  float d[STEPS][VEC], p[STEPS][VEC];
  float dot = 0.f;
  MK_UNROLL for (int k = 0; k < STEPS; k++) {
    const int c = (k * THREADS + int(threadIdx.x)) * VEC;
    if (MK_WITHIN(c, keys)) {
      load_floats(d[k], dy + row + c);
      load_floats(p[k], y + row + c);
      MK_UNROLL for (int i = 0; i < VEC; i++) dot += d[k][i] * p[k][i];
    }
  }
  dot = block_reduce<Sum, THREADS>(dot, part);
  MK_UNROLL for (int k = 0; k < STEPS; k++) {
    const int c = (k * THREADS + int(threadIdx.x)) * VEC;
    if (MK_WITHIN(c, keys)) {
      MK_UNROLL for (int i = 0; i < VEC; i++) d[k][i] = scale * p[k][i] * (d[k][i] - dot);
      store_floats(dx + row + c, d[k]);
    }
  }
}

}  // namespace mk

MK_API int mk_softmax_forward(void* y, const void* x, const uint8_t* allowed, int64_t batch, int heads, int queries, int keys,
                              float scale, int causal, int dtype, void* stream) {
  if (heads < 1 || queries < 1) return mk::kBadSize;
  return mk::by_type(dtype, [&](auto t) {
    using T = decltype(t);
    return mk::by_width<T>(keys % (16 / int(sizeof(T))) == 0 && mk::aligned(y, x, allowed), [&](auto vec) {
      constexpr int VEC = decltype(vec)::value;
      return mk::by_columns<VEC>(keys, [&](auto threads, auto elements) {
        constexpr int THREADS = decltype(threads)::value, ELEMENTS = decltype(elements)::value;
        return mk::launch("softmax_forward", mk::softmax_forward<T, VEC, THREADS, ELEMENTS>, batch * heads * queries, THREADS,
                          (cudaStream_t)stream, (T*)y, (const T*)x, allowed, heads, queries, keys, scale, causal);
      });
    });
  });
}

MK_API int mk_softmax_backward(void* dx, const void* dy, const void* y, int64_t rows, int keys, float scale, int dtype,
                               void* stream) {
  return mk::by_type(dtype, [&](auto t) {
    using T = decltype(t);
    return mk::by_width<T>(keys % (16 / int(sizeof(T))) == 0 && mk::aligned(dx, dy, y), [&](auto vec) {
      constexpr int VEC = decltype(vec)::value;
      return mk::by_columns<VEC>(keys, [&](auto threads, auto elements) {
        constexpr int THREADS = decltype(threads)::value, ELEMENTS = decltype(elements)::value;
        return mk::launch("softmax_backward", mk::softmax_backward<T, VEC, THREADS, ELEMENTS>, rows, THREADS,
                          (cudaStream_t)stream, (T*)dx, (const T*)dy, (const T*)y, keys, scale);
      });
    });
  });
}
