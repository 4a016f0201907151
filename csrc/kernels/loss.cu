// The local halves of a vocab-parallel cross entropy; what the ranks tell each other lies between them.
#include "../include/megakit/abi.h"
#include "../include/megakit/reduce.h"
#include "../include/megakit/vector.h"

namespace mk {

constexpr int kLossThreads = 512;

// Of some columns: their maximum, the sum of exp(z - max), the sum of z.
struct Stats {
  float max, exps, sum;
};
MK_DEVICE Stats other_lane(Stats x, int o) { return {other_lane(x.max, o), other_lane(x.exps, o), other_lane(x.sum, o)}; }

struct Join {
  static MK_DEVICE Stats of(Stats a, Stats b) {
    const float max = fmaxf(a.max, b.max);
    if (max == -INFINITY) return {max, 0.f, a.sum + b.sum};  // else exp(-inf - -inf)
    return {max, a.exps * expf(a.max - max) + b.exps * expf(b.max - max), a.sum + b.sum};
  }
};

// One block per row, which is read once (Milakov & Gimelshein 2018, online softmax).
template <class T, int VEC>
__global__ __launch_bounds__(kLossThreads, 2) void loss_forward(float* stats, const T* logits, const int64_t* labels, long long rows,
                                                             int cols, int stride, long long first) {
  MK_SHARED(Stats, part, kLossThreads / 32);
  const T* const row = logits + (long long)blockIdx.x * stride;
  Stats own{-INFINITY, 0.f, 0.f};
  for (int c = int(threadIdx.x) * VEC; MK_WITHIN(c, cols); c += kLossThreads * VEC) {
    float z[VEC];
    load_floats(z, row + c);
    Stats here{-INFINITY, 0.f, 0.f};
    MK_UNROLL for (int i = 0; i < VEC; i++) {
      if (MK_WITHIN(c + i, cols)) here.max = fmaxf(here.max, z[i]), here.sum += z[i];
      else z[i] = -INFINITY;  // padding
    }
    const float max = fmaxf(own.max, here.max);
    if (max != -INFINITY)
      MK_UNROLL for (int i = 0; i < VEC; i++) here.exps += expf(z[i] - max);
    own = {max, here.exps + (own.max == -INFINITY ? 0.f : own.exps * expf(own.max - max)), own.sum + here.sum};
  }
  own = block_reduce<Join, kLossThreads>(own, part);
  if (threadIdx.x == 0) {
    const long long label = load(labels + blockIdx.x) - first;
    store(stats + blockIdx.x, own.max);
    store(stats + rows + blockIdx.x, own.sum == own.sum ? own.exps : own.sum);  // fmaxf passes over a NaN
    store(stats + 2 * rows + blockIdx.x, label >= 0 && MK_WITHIN(label, cols) ? to_float(load(row + label)) : 0.f);
    store(stats + 3 * rows + blockIdx.x, own.sum);
  }
}

template <class T, int VEC>
__global__ __launch_bounds__(kLossThreads) void loss_backward(T* logits, const float* max_in, const float* exps_in, const float* grad_in,
                                                              const int64_t* labels, int cols, int stride, long long first,
                                                              long long ignore, float smoothing, float smooth_each,
                                                              float z_loss) {
  T* const row = logits + (long long)blockIdx.x * stride;
  const long long id = load(labels + blockIdx.x), label = id - first;
  // not exp(z - lse): the rounding of a large lse would be an error of every probability
  const float max = load(max_in + blockIdx.x), exps = load(exps_in + blockIdx.x);
  const float grad = id == ignore ? 0.f : load(grad_in);
  const float weight = (1.f + 2.f * z_loss * (max + logf(exps))) / exps;
  for (int c = int(threadIdx.x) * VEC; MK_WITHIN(c, stride); c += kLossThreads * VEC) {
    float z[VEC];
    load_floats(z, row + c);
    MK_UNROLL for (int i = 0; i < VEC; i++) {
      const float d = expf(z[i] - max) * weight - smooth_each - (c + i == label ? 1.f - smoothing : 0.f);
      z[i] = id != ignore && MK_WITHIN(c + i, cols) ? d * grad : 0.f;
    }
    store_floats(row + c, z);
  }
}

}  // namespace mk

MK_API int mk_loss_forward(float* stats, const void* logits, const int64_t* labels, int64_t rows, int cols, int stride,
                           int64_t first, int dtype, void* stream) {
  if (cols < 0 || stride < cols) return mk::kBadSize;
  return mk::by_type(dtype, [&](auto t) {
    using T = decltype(t);
    return mk::by_width<T>(stride % (16 / int(sizeof(T))) == 0 && mk::aligned(logits), [&](auto vec) {
      return mk::launch("loss_forward", mk::loss_forward<T, decltype(vec)::value>, rows, mk::kLossThreads, (cudaStream_t)stream,
                        stats, (const T*)logits, labels, (long long)rows, cols, stride, (long long)first);
    });
  });
}

MK_API int mk_loss_backward(void* logits, const float* max, const float* exps, const float* grad, const int64_t* labels, int64_t rows, int cols,
                            int stride, int64_t first, int64_t ignore, float smoothing, int64_t vocab, float z_loss, int dtype,
                            void* stream) {
  if (cols < 0 || stride < cols || vocab < 1) return mk::kBadSize;
  return mk::by_type(dtype, [&](auto t) {
    using T = decltype(t);
    return mk::by_width<T>(stride % (16 / int(sizeof(T))) == 0 && mk::aligned(logits), [&](auto vec) {
      return mk::launch("loss_backward", mk::loss_backward<T, decltype(vec)::value>, rows, mk::kLossThreads,
                        (cudaStream_t)stream, (T*)logits, max, exps, grad, labels, cols, stride, (long long)first,
                        (long long)ignore, smoothing, float(smoothing / double(vocab)), z_loss);
    });
  });
}
