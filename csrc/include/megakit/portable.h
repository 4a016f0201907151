// portable.h - what every kernel includes. One source, two builds:
//   nvcc                     the GPU's kernels
//   g++ -DMEGAKIT_EMULATED   the same kernels on the host (sim/)
#pragma once
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef MEGAKIT_EMULATED
#include "../../sim/simt.h"
#define MK_NOTE(p, bytes, store) simt::note(p, bytes, store)
#define MK_UNROLL
// An array in shared memory.
#define MK_SHARED(T, name, n) \
  static char name##_key;     \
  T* const name = static_cast<T*>(simt::shared(&name##_key, sizeof(T) * (n)))
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define MK_NOTE(p, bytes, store)
#define MK_UNROLL _Pragma("unroll")
#define MK_SHARED(T, name, n) __shared__ __align__(16) T name[n]
#endif

// Every barrier is MK_SYNC and every test of a bound is MK_WITHIN, so that the tests can plant a fault at each: a barrier
// that is left out, a bound that is one too far.
#ifdef MEGAKIT_MUTANTS
#define MK_SYNC() (simt::mutated(__FILE__, __LINE__) ? void() : __syncthreads())
#define MK_WITHIN(i, n) ((i) < (n) + (simt::mutated(__FILE__, __LINE__) ? 1 : 0))
#else
#define MK_SYNC() __syncthreads()
#define MK_WITHIN(i, n) ((i) < (n))
#endif

#define MK_DEVICE __device__ __forceinline__
#define MK_API extern "C" __attribute__((visibility("default")))

namespace mk {

#ifdef MEGAKIT_EMULATED
using bf16 = simt::bf16;
using half = simt::half;
MK_DEVICE float to_float(bf16 x) { return simt::widen(x); }
MK_DEVICE float to_float(half x) { return simt::widen(x); }
#else
using bf16 = __nv_bfloat16;
using half = __half;
MK_DEVICE float to_float(bf16 x) { return __bfloat162float(x); }
MK_DEVICE float to_float(half x) { return __half2float(x); }
#endif
MK_DEVICE float to_float(float x) { return x; }

// To T, rounded to nearest even.
template <class T>
MK_DEVICE T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) return x;
#ifdef MEGAKIT_EMULATED
  else if constexpr (std::is_same_v<T, bf16>) return simt::narrow_bf16(x);
  else return simt::narrow_half(x);
#else
  else if constexpr (std::is_same_v<T, bf16>) return __float2bfloat16_rn(x);
  else return __float2half_rn(x);
#endif
}

// Results of an entry point: 0, a negative refusal, or a positive CUDA error.
enum Status : int { kOk = 0, kBadType = -1, kBadSize = -2 };

// One block per unit of work: `blocks` may be 0, then nothing is launched.
template <class... P, class... A>
int launch(const char* name, void (*kernel)(P...), long long blocks, int threads, cudaStream_t stream, A... args) {
  if (blocks < 0 || blocks > INT_MAX) return kBadSize;
  if (blocks == 0) return kOk;
#ifdef MEGAKIT_EMULATED
  (void)stream;
  simt::launch(name, dim3(unsigned(blocks)), dim3(unsigned(threads)), [=] { kernel(args...); });
  return kOk;
#else
  (void)name;
  kernel<<<unsigned(blocks), unsigned(threads), 0, stream>>>(static_cast<P>(args)...);
  return int(cudaGetLastError());
#endif
}

// Calls f with a value of the type that `dtype` names: 0 float, 1 bf16, 2 half.
template <class F>
int by_type(int dtype, F f) {
  switch (dtype) {
    case 0: return f(float{});
    case 1: return f(bf16{});
    case 2: return f(half{});
    default: return kBadType;
  }
}

// Calls f with the elements of one access as a compile-time number: 16 bytes where `aligned`, else one element.
template <class T, class F>
int by_width(bool aligned, F f) {
  return aligned ? f(std::integral_constant<int, 16 / int(sizeof(T))>{}) : f(std::integral_constant<int, 1>{});
}

inline bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }
template <class... P>
bool aligned(const void* p, const P*... more) {
  return aligned(p) && aligned(more...);
}

}  // namespace mk
