// vector.h - accesses to global memory: N elements at once, 16 bytes where N x sizeof(T) is 16.
#pragma once
#include "portable.h"

namespace mk {

// The register of an access.
template <int BYTES>
struct Raw;
template <>
struct Raw<16> {
  using type = uint4;
};
template <>
struct Raw<8> {
  using type = uint2;
};
template <>
struct Raw<4> {
  using type = unsigned;
};
template <>
struct Raw<2> {
  using type = unsigned short;
};
template <>
struct Raw<1> {
  using type = unsigned char;
};

template <class T, int N>
struct Vec {
  T v[N];
};

template <class T, int N>
MK_DEVICE Vec<T, N> load(const T* p) {
  using R = typename Raw<int(sizeof(T)) * N>::type;
  MK_NOTE(p, int(sizeof(T)) * N, false);
  const R raw = *reinterpret_cast<const R*>(p);
  Vec<T, N> x;
  memcpy(&x, &raw, sizeof x);
  return x;
}

template <class T, int N>
MK_DEVICE void store(T* p, const Vec<T, N>& x) {
  using R = typename Raw<int(sizeof(T)) * N>::type;
  MK_NOTE(p, int(sizeof(T)) * N, true);
  R raw;
  memcpy(&raw, &x, sizeof x);
  *reinterpret_cast<R*>(p) = raw;
}

template <class T>
MK_DEVICE T load(const T* p) {
  MK_NOTE(p, int(sizeof(T)), false);
  return *p;
}
template <class T>
MK_DEVICE void store(T* p, T x) {
  MK_NOTE(p, int(sizeof(T)), true);
  *p = x;
}

// N elements to or from fp32.
template <class T, int N>
MK_DEVICE void load_floats(float (&out)[N], const T* p) {
  const Vec<T, N> x = load<T, N>(p);
  MK_UNROLL for (int i = 0; i < N; i++) out[i] = to_float(x.v[i]);
}
template <class T, int N>
MK_DEVICE void store_floats(T* p, const float (&x)[N]) {
  Vec<T, N> out;
  MK_UNROLL for (int i = 0; i < N; i++) out.v[i] = from_float<T>(x[i]);
  store<T, N>(p, out);
}

// N floats, in accesses of 16 bytes where N is a multiple of 4.
template <int N>
MK_DEVICE void load_fp32(float (&out)[N], const float* p) {
  constexpr int M = N % 4 == 0 ? 4 : 1;
  MK_UNROLL for (int i = 0; i < N; i += M) {
    const Vec<float, M> x = load<float, M>(p + i);
    MK_UNROLL for (int j = 0; j < M; j++) out[i + j] = x.v[j];
  }
}
template <int N>
MK_DEVICE void store_fp32(float* p, const float (&x)[N]) {
  constexpr int M = N % 4 == 0 ? 4 : 1;
  MK_UNROLL for (int i = 0; i < N; i += M) {
    Vec<float, M> out;
    MK_UNROLL for (int j = 0; j < M; j++) out.v[j] = x[i + j];
    store<float, M>(p + i, out);
  }
}

}  // namespace mk
