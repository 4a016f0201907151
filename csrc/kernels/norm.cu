// RMSNorm and LayerNorm, with and without a residual that is added before.
#include "../include/megakit/abi.h"
#include "../include/megakit/columns.h"
#include "../include/megakit/reduce.h"
#include "../include/megakit/rows.h"
#include "../include/megakit/vector.h"

namespace mk {

// One block per row, which it holds in registers: THREADS x ELEMENTS columns at most.
template <class T, int VEC, int THREADS, int ELEMENTS, bool LAYER>
__global__ __launch_bounds__(THREADS) void norm_forward(T* y, T* sum, float* mean_out, float* rstd_out, const T* x,
                                                        const T* residual, const T* weight, const T* bias, int cols,
                                                        float eps) {
  constexpr int STEPS = ELEMENTS / VEC;
  MK_SHARED(float, part, THREADS / 32);
  const long long row = (long long)blockIdx.x * cols;
  float h[STEPS][VEC];
  float total = 0.f;
  MK_UNROLL for (int k = 0; k < STEPS; k++) {
    const int c = (k * THREADS + int(threadIdx.x)) * VEC;
    if (MK_WITHIN(c, cols)) {
      load_floats(h[k], x + row + c);
      if (residual) {
        float r[VEC];
        load_floats(r, residual + row + c);
        MK_UNROLL for (int i = 0; i < VEC; i++) h[k][i] = to_float(from_float<T>(h[k][i] + r[i]));
        store_floats(sum + row + c, h[k]);
      }
      MK_UNROLL for (int i = 0; i < VEC; i++) total += LAYER ? h[k][i] : h[k][i] * h[k][i];
    }
  }
  total = block_reduce<Sum, THREADS>(total, part);
  float mean = 0.f;
  if constexpr (LAYER) {  // the variance in a second pass: the difference of two sums would cancel
    mean = total / cols;
    float square = 0.f;
    MK_UNROLL for (int k = 0; k < STEPS; k++) {
      if (const int c = (k * THREADS + int(threadIdx.x)) * VEC; MK_WITHIN(c, cols))
        MK_UNROLL for (int i = 0; i < VEC; i++) square += (h[k][i] - mean) * (h[k][i] - mean);
    }
    total = block_reduce<Sum, THREADS>(square, part);
  }
  const float rstd = rsqrtf(total / cols + eps);
  if (threadIdx.x == 0) {
    if constexpr (LAYER) store(mean_out + blockIdx.x, mean);
    store(rstd_out + blockIdx.x, rstd);
  }
  MK_UNROLL for (int k = 0; k < STEPS; k++) {
    const int c = (k * THREADS + int(threadIdx.x)) * VEC;
    if (MK_WITHIN(c, cols)) {
      float w[VEC], b[VEC] = {};
      load_floats(w, weight + c);
      if constexpr (LAYER) load_floats(b, bias + c);
      MK_UNROLL for (int i = 0; i < VEC; i++) w[i] = (h[k][i] - mean) * rstd * w[i] + b[i];
      store_floats(y + row + c, w);
    }
  }
}

// What a thread has of a row on its way: its columns of h, dy and, if it is added, dsum.
template <class T, int VEC, int STEPS>
struct Row {
  Vec<T, VEC> h[STEPS], g[STEPS], d[STEPS];
  float rstd, mean;
};

// With n = (h - mean) rstd and g = dy weight: dx = rstd (g - mean(g) - n mean(g n)) (+ dsum), without mean(g) for RMSNorm.
// Each of the persistent blocks sums dweight = dy n and dbias = dy over its rows in registers, and writes one partial row.
// There are about as many blocks as multiprocessors, since each partial row costs bytes. So that a block alone keeps the memory
// busy, also while it waits for its reduction, the next AHEAD rows are on their way while one is computed.
template <class T, int VEC, int THREADS, int ELEMENTS, bool LAYER>
__global__ __launch_bounds__(THREADS, 1) void norm_backward(T* dx, float* part_weight, float* part_bias, const T* dy, const T* dsum,
                                                         const T* h, const T* weight, const float* mean_in,
                                                         const float* rstd_in, long long rows, int cols) {
  constexpr int STEPS = ELEMENTS / VEC;
  constexpr bool HOLD = STEPS * ((VEC * sizeof(T) + 3) / 4) <= 8;  // else registers don't do: the row is read again, from L1
  constexpr int AHEAD = HOLD && THREADS <= 256 ? 2 : 0;            // 512 threads have 128 registers each; their rows are long
  MK_SHARED(Pair, part, THREADS / 32);
  float dweight[STEPS][VEC] = {}, dbias[LAYER ? STEPS : 1][VEC] = {};
  Row<T, VEC, STEPS> held[AHEAD + 1];
  const auto fetch = [&](Row<T, VEC, STEPS>& to, long long r) {
    if (!MK_WITHIN(r, rows)) return;
    to.rstd = load(rstd_in + r);
    to.mean = LAYER ? load(mean_in + r) : 0.f;
    if constexpr (HOLD) {
      MK_UNROLL for (int k = 0; k < STEPS; k++) {
        const int c = (k * THREADS + int(threadIdx.x)) * VEC;
        if (MK_WITHIN(c, cols)) {
          to.h[k] = load<T, VEC>(h + r * cols + c);
          to.g[k] = load<T, VEC>(dy + r * cols + c);
          if constexpr (AHEAD > 0)
            if (dsum) to.d[k] = load<T, VEC>(dsum + r * cols + c);
        }
      }
    }
  };
  MK_UNROLL for (int a = 0; a < AHEAD; a++) fetch(held[a], blockIdx.x + (long long)a * gridDim.x);
  for (long long r = blockIdx.x; MK_WITHIN(r, rows); r += gridDim.x) {
    const long long row = r * cols;
    fetch(held[AHEAD], r + (long long)AHEAD * gridDim.x);
    Row<T, VEC, STEPS>& now = held[0];
    const float rstd = now.rstd, mean = now.mean;
    Pair total = {0.f, 0.f};
    MK_UNROLL for (int k = 0; k < STEPS; k++) {
      const int c = (k * THREADS + int(threadIdx.x)) * VEC;
      if (MK_WITHIN(c, cols)) {
        if constexpr (!HOLD) {
          now.h[k] = load<T, VEC>(h + row + c);
          now.g[k] = load<T, VEC>(dy + row + c);
        }
        float w[VEC];
        load_floats(w, weight + c);
        MK_UNROLL for (int i = 0; i < VEC; i++) {
          const float n = (to_float(now.h[k].v[i]) - mean) * rstd, d = to_float(now.g[k].v[i]);
          dweight[k][i] += d * n;
          if constexpr (LAYER) dbias[k][i] += d;
          total = total + Pair{d * w[i], d * w[i] * n};
        }
      }
    }
    total = block_reduce<Sum, THREADS>(total, part);
    const float mean_g = LAYER ? total.a / cols : 0.f, mean_gn = total.b / cols;
    MK_UNROLL for (int k = 0; k < STEPS; k++) {
      const int c = (k * THREADS + int(threadIdx.x)) * VEC;
      if (MK_WITHIN(c, cols)) {
        float w[VEC], d[VEC] = {};
        load_floats(w, weight + c);
        if (dsum) {
          if constexpr (AHEAD == 0) now.d[k] = load<T, VEC>(dsum + row + c);
          MK_UNROLL for (int i = 0; i < VEC; i++) d[i] = to_float(now.d[k].v[i]);
        }
        if constexpr (!HOLD) {
          now.h[k] = load<T, VEC>(h + row + c);
          now.g[k] = load<T, VEC>(dy + row + c);
        }
        MK_UNROLL for (int i = 0; i < VEC; i++) {
          const float n = (to_float(now.h[k].v[i]) - mean) * rstd;
          d[i] += rstd * (to_float(now.g[k].v[i]) * w[i] - mean_g - n * mean_gn);
        }
        store_floats(dx + row + c, d);
      }
    }
    MK_UNROLL for (int a = 0; a < AHEAD; a++) held[a] = held[a + 1];
  }
  MK_UNROLL for (int k = 0; k < STEPS; k++) {
    const int c = (k * THREADS + int(threadIdx.x)) * VEC;
    if (MK_WITHIN(c, cols)) {
      store_fp32(part_weight + (long long)blockIdx.x * cols + c, dweight[k]);
      if constexpr (LAYER) store_fp32(part_bias + (long long)blockIdx.x * cols + c, dbias[k]);
    }
  }
}

template <bool LAYER, class T>
int forward(T* y, T* sum, float* mean, float* rstd, const T* x, const T* residual, const T* weight, const T* bias,
            int64_t rows, int cols, float eps, cudaStream_t stream) {
  const bool wide = cols % (16 / int(sizeof(T))) == 0 && aligned(y, sum, x, residual, weight, bias);
  return by_width<T>(wide, [&](auto vec) {
    constexpr int VEC = decltype(vec)::value;
    return by_columns<VEC>(cols, [&](auto threads, auto elements) {
      constexpr int THREADS = decltype(threads)::value, ELEMENTS = decltype(elements)::value;
      return launch("norm_forward", norm_forward<T, VEC, THREADS, ELEMENTS, LAYER>, rows, THREADS, stream, y, sum, mean, rstd,
                    x, residual, weight, bias, cols, eps);
    });
  });
}

template <bool LAYER, class T>
int backward(T* dx, T* dweight, T* dbias, float* part, const T* dy, const T* dsum, const T* h, const T* weight,
             const float* mean, const float* rstd, int64_t rows, int cols, int blocks, cudaStream_t stream) {
  const bool wide = cols % (16 / int(sizeof(T))) == 0 && aligned(dx, part, dy, dsum, h, weight);
  float* const part_bias = LAYER ? part + (long long)blocks * cols : nullptr;
  const int status = by_width<T>(wide, [&](auto vec) {
    constexpr int VEC = decltype(vec)::value;
    return by_columns<VEC>(cols, [&](auto threads, auto elements) {
      constexpr int THREADS = decltype(threads)::value, ELEMENTS = decltype(elements)::value;
      return launch("norm_backward", norm_backward<T, VEC, THREADS, ELEMENTS, LAYER>, blocks, THREADS, stream, dx, part,
                    part_bias, dy, dsum, h, weight, mean, rstd, (long long)rows, cols);
    });
  });
  if (status) return status;
  const int again = launch_column_sum(dweight, part, blocks, cols, stream);
  return again || !LAYER ? again : launch_column_sum(dbias, part_bias, blocks, cols, stream);
}

}  // namespace mk

MK_API int mk_norm_forward(void* y, void* sum, float* mean, float* rstd, const void* x, const void* residual,
                           const void* weight, const void* bias, int64_t rows, int cols, float eps, int dtype, void* stream) {
  return mk::by_type(dtype, [&](auto t) {
    using T = decltype(t);
    const auto f = bias ? mk::forward<true, T> : mk::forward<false, T>;
    return f((T*)y, (T*)sum, mean, rstd, (const T*)x, (const T*)residual, (const T*)weight, (const T*)bias, rows, cols, eps,
             (cudaStream_t)stream);
  });
}

MK_API int mk_norm_backward(void* dx, void* dweight, void* dbias, float* part, const void* dy, const void* dsum, const void* h,
                            const void* weight, const float* mean, const float* rstd, int64_t rows, int cols, int blocks,
                            int dtype, void* stream) {
  return mk::by_type(dtype, [&](auto t) {
    using T = decltype(t);
    const auto f = dbias ? mk::backward<true, T> : mk::backward<false, T>;
    return f((T*)dx, (T*)dweight, (T*)dbias, part, (const T*)dy, (const T*)dsum, (const T*)h, (const T*)weight, mean, rstd,
             rows, cols, blocks, (cudaStream_t)stream);
  });
}
