// types.h - what nvcc knows of itself: CUDA's vector types and qualifiers, bf16 and fp16, for the host emulation.
// So it needs no CUDA headers.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

using cudaStream_t = void*;

struct uint3 {
  unsigned x, y, z;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace simt {

inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

struct bf16 {
  uint16_t bits;
};
struct half {
  uint16_t bits;
};

inline float widen(bf16 x) { return float_of(uint32_t(x.bits) << 16); }

inline float widen(half x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  if (exponent == 31) return float_of(sign | 0x7f800000 | fraction << 13);
  if (exponent == 0) return float_of(sign | bits_of(float(fraction) * 0x1p-24f));
  return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

// Round to nearest, ties to even.
inline bf16 narrow_bf16(float x) {
  const uint32_t u = bits_of(x);
  if (x != x) return {uint16_t(u >> 16 | 0x40)};
  return {uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}

inline half narrow_half(float x) {
  const uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffff;
  if (magnitude > 0x7f800000) return {uint16_t(sign | 0x7e00)};
  if (magnitude >= 0x47800000) return {uint16_t(sign | 0x7c00)};  // 65536 and more
  if (magnitude < 0x38800000)                                     // a subnormal: a multiple of 2^-24
    return {uint16_t(sign | uint32_t(std::nearbyint(float_of(magnitude) * 0x1p24f)))};
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return {uint16_t(sign | (rounded - 0x38000000) >> 13)};  // may carry up to infinity
}

}  // namespace simt
