// simt.h - CUDA kernels on the host, for tests: one fiber per CUDA thread. Barriers and warp exchanges really suspend the
// fiber, so data really travels between threads; all run on one operating system thread, in a chosen order.
#pragma once
#include "types.h"

#include <type_traits>

namespace simt {

extern uint3 thread_index, block_index;  // of the running thread, set at each switch
extern dim3 block_size, grid_size;

void sync_block(const char* file, int line);
void* shared(const void* key, size_t bytes);  // this block's array of the declaration that `key` stands for
void exchange(uint64_t* value, int lane, const char* file, int line);  // own value out, that of `lane` in
int lane_id();
void launch(const char* name, dim3 grid, dim3 block, void (*body)(void*), void* arg);
void note(const void* p, int bytes, bool store);  // one access to global memory by one thread
bool mutated(const char* file, int line);         // the fault to plant is the one at this place

template <class F>
void launch(const char* name, dim3 grid, dim3 block, F kernel) {
  launch(name, grid, block, [](void* p) { (*static_cast<F*>(p))(); }, &kernel);
}

template <class T>
T shuffle(T value, int lane, const char* file, int line) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  exchange(&word, lane, file, line);
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

}  // namespace simt

#define threadIdx (simt::thread_index)
#define blockIdx (simt::block_index)
#define blockDim (simt::block_size)
#define gridDim (simt::grid_size)
#define __syncthreads() simt::sync_block(__FILE__, __LINE__)
// All 32 lanes take part: no kernel here needs another mask.
#define __shfl_xor_sync(mask, value, x) simt::shuffle(value, simt::lane_id() ^ (x), __FILE__, __LINE__)

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
