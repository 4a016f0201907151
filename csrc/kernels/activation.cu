// SwiGLU and GELU with a bias.
#include "../include/megakit/abi.h"
#include "../include/megakit/columns.h"
#include "../include/megakit/vector.h"

namespace mk {

constexpr int kThreads = 128;

// A block's piece of a row: `chunks` of them make a row.
struct Place {
  long long row;
  int col;
};
template <int VEC>
MK_DEVICE Place place(int chunks) {
  const long long row = blockIdx.x / unsigned(chunks);
  return {row, (int(blockIdx.x - row * chunks) * kThreads + int(threadIdx.x)) * VEC};
}

MK_DEVICE float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

template <class T, int VEC>
__global__ __launch_bounds__(kThreads) void swiglu_forward(T* y, const T* x, int cols, int chunks) {
  const Place at = place<VEC>(chunks);
  if (MK_WITHIN(at.col, cols)) {
    float gate[VEC], up[VEC];
    load_floats(gate, x + at.row * 2 * cols + at.col);
    load_floats(up, x + (at.row * 2 + 1) * cols + at.col);
    MK_UNROLL for (int i = 0; i < VEC; i++) up[i] *= gate[i] * sigmoid(gate[i]);
    store_floats(y + at.row * cols + at.col, up);
  }
}

// d up = dy g s and d gate = dy up s (1 + g (1 - s)), with s the sigmoid of the gate g.
template <class T, int VEC>
__global__ __launch_bounds__(kThreads) void swiglu_backward(T* dx, const T* dy, const T* x, int cols, int chunks) {
  const Place at = place<VEC>(chunks);
  if (MK_WITHIN(at.col, cols)) {
    float gate[VEC], up[VEC], d[VEC];
    load_floats(gate, x + at.row * 2 * cols + at.col);
    load_floats(up, x + (at.row * 2 + 1) * cols + at.col);
    load_floats(d, dy + at.row * cols + at.col);
    MK_UNROLL for (int i = 0; i < VEC; i++) {
      const float g = gate[i], s = sigmoid(g);
      gate[i] = d[i] * up[i] * s * (1.f + g * (1.f - s));
      up[i] = d[i] * g * s;
    }
    store_floats(dx + at.row * 2 * cols + at.col, gate);
    store_floats(dx + (at.row * 2 + 1) * cols + at.col, up);
  }
}

constexpr float kSqrtHalf = 0.70710678118654752f;       // 1 / sqrt(2)
constexpr float kDensity = 0.39894228040143268f;        // 1 / sqrt(2 pi)
constexpr float kTanhScale = 0.79788456080286536f;      // sqrt(2 / pi)
constexpr float kTanhCube = 0.044715f;

// Hendrycks & Gimpel 2016: x Phi(x), or its approximation by a tanh.
template <bool TANH>
MK_DEVICE float gelu(float x) {
  if constexpr (TANH) return 0.5f * x * (1.f + tanhf(kTanhScale * (x + kTanhCube * x * x * x)));
  else return 0.5f * x * (1.f + erff(x * kSqrtHalf));
}
template <bool TANH>
MK_DEVICE float gelu_slope(float x) {
  if constexpr (TANH) {
    const float t = tanhf(kTanhScale * (x + kTanhCube * x * x * x));
    return 0.5f * (1.f + t) + 0.5f * x * (1.f - t * t) * kTanhScale * (1.f + 3.f * kTanhCube * x * x);
  } else {
    return 0.5f * (1.f + erff(x * kSqrtHalf)) + x * kDensity * expf(-0.5f * x * x);
  }
}

template <class T, int VEC, bool TANH>
__global__ __launch_bounds__(kThreads) void gelu_forward(T* y, const T* x, const T* bias, int cols, int chunks) {
  const Place at = place<VEC>(chunks);
  if (MK_WITHIN(at.col, cols)) {
    float v[VEC], b[VEC] = {};
    load_floats(v, x + at.row * cols + at.col);
    if (bias) load_floats(b, bias + at.col);
    MK_UNROLL for (int i = 0; i < VEC; i++) v[i] = gelu<TANH>(v[i] + b[i]);
    store_floats(y + at.row * cols + at.col, v);
  }
}

// Persistent blocks: each goes down its columns, every `groups`-th row, and leaves its part of dbias.
template <class T, int VEC, bool TANH>
__global__ __launch_bounds__(kThreads) void gelu_backward(T* dx, float* part, const T* dy, const T* x, const T* bias, long long rows,
                                                          int cols, int chunks, int groups) {
  const Place at = place<VEC>(chunks);
  if (MK_WITHIN(at.col, cols)) {
    float b[VEC] = {}, dbias[VEC] = {};
    if (bias) load_floats(b, bias + at.col);
    for (long long r = at.row; MK_WITHIN(r, rows); r += groups) {
      float v[VEC], d[VEC];
      load_floats(v, x + r * cols + at.col);
      load_floats(d, dy + r * cols + at.col);
      MK_UNROLL for (int i = 0; i < VEC; i++) {
        d[i] *= gelu_slope<TANH>(v[i] + b[i]);
        dbias[i] += d[i];
      }
      store_floats(dx + r * cols + at.col, d);
    }
    if (part) store_fp32(part + at.row * cols + at.col, dbias);
  }
}

int chunks_of(int cols, int vec) { return (cols + kThreads * vec - 1) / (kThreads * vec); }

template <class T>
bool wide(int cols) {
  return cols % (16 / int(sizeof(T))) == 0;
}

}  // namespace mk

MK_API int mk_swiglu_forward(void* y, const void* x, int64_t rows, int cols, int dtype, void* stream) {
  if (cols < 1) return mk::kBadSize;
  return mk::by_type(dtype, [&](auto t) {
    using T = decltype(t);
    return mk::by_width<T>(mk::wide<T>(cols) && mk::aligned(y, x), [&](auto vec) {
      constexpr int VEC = decltype(vec)::value;
      const int chunks = mk::chunks_of(cols, VEC);
      return mk::launch("swiglu_forward", mk::swiglu_forward<T, VEC>, rows * chunks, mk::kThreads, (cudaStream_t)stream, (T*)y,
                        (const T*)x, cols, chunks);
    });
  });
}

MK_API int mk_swiglu_backward(void* dx, const void* dy, const void* x, int64_t rows, int cols, int dtype, void* stream) {
  if (cols < 1) return mk::kBadSize;
  return mk::by_type(dtype, [&](auto t) {
    using T = decltype(t);
    return mk::by_width<T>(mk::wide<T>(cols) && mk::aligned(dx, dy, x), [&](auto vec) {
      constexpr int VEC = decltype(vec)::value;
      const int chunks = mk::chunks_of(cols, VEC);
      return mk::launch("swiglu_backward", mk::swiglu_backward<T, VEC>, rows * chunks, mk::kThreads, (cudaStream_t)stream,
                        (T*)dx, (const T*)dy, (const T*)x, cols, chunks);
    });
  });
}

MK_API int mk_gelu_forward(void* y, const void* x, const void* bias, int64_t rows, int cols, int tanh, int dtype, void* stream) {
  if (cols < 1) return mk::kBadSize;
  return mk::by_type(dtype, [&](auto t) {
    using T = decltype(t);
    return mk::by_width<T>(mk::wide<T>(cols) && mk::aligned(y, x, bias), [&](auto vec) {
      constexpr int VEC = decltype(vec)::value;
      const int chunks = mk::chunks_of(cols, VEC);
      const auto kernel = tanh ? mk::gelu_forward<T, VEC, true> : mk::gelu_forward<T, VEC, false>;
      return mk::launch("gelu_forward", kernel, rows * chunks, mk::kThreads, (cudaStream_t)stream, (T*)y, (const T*)x,
                        (const T*)bias, cols, chunks);
    });
  });
}

MK_API int mk_gelu_backward(void* dx, void* dbias, float* part, const void* dy, const void* x, const void* bias, int64_t rows,
                            int cols, int blocks, int tanh, int dtype, void* stream) {
  if (cols < 1 || blocks < 1) return mk::kBadSize;
  return mk::by_type(dtype, [&](auto t) {
    using T = decltype(t);
    const int status = mk::by_width<T>(mk::wide<T>(cols) && mk::aligned(dx, part, dy, x, bias), [&](auto vec) {
      constexpr int VEC = decltype(vec)::value;
      const int chunks = mk::chunks_of(cols, VEC);
      const auto kernel = tanh ? mk::gelu_backward<T, VEC, true> : mk::gelu_backward<T, VEC, false>;
      return mk::launch("gelu_backward", kernel, (long long)blocks * chunks, mk::kThreads, (cudaStream_t)stream, (T*)dx, part,
                        (const T*)dy, (const T*)x, (const T*)bias, (long long)rows, cols, chunks, blocks);
    });
    return status || !dbias ? status : mk::launch_column_sum((T*)dbias, part, blocks, cols, (cudaStream_t)stream);
  });
}
