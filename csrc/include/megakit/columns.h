// columns.h - the second half of a sum over rows: persistent blocks leave one partial row each, these are added here.
#pragma once
#include "vector.h"

namespace mk {

constexpr int kColumnGroups = 8;
constexpr int kColumnThreads = 32 * kColumnGroups;

// out[c] = sum over r of part[r][c]: a block has 32 columns, and each of its warps every 8th row.
template <class T>
__global__ void __launch_bounds__(kColumnThreads) column_sum(T* out, const float* part, int rows, int cols) {
  MK_SHARED(float, tile, kColumnThreads);
  const int lane = threadIdx.x & 31, group = threadIdx.x >> 5;
  const int c = blockIdx.x * 32 + lane;
  float sum = 0.f;
  if (MK_WITHIN(c, cols))
    for (int r = group; MK_WITHIN(r, rows); r += kColumnGroups) sum += load(part + (long long)r * cols + c);
  tile[threadIdx.x] = sum;
  MK_SYNC();
  if (group == 0 && MK_WITHIN(c, cols)) {
    MK_UNROLL for (int g = 1; g < kColumnGroups; g++) sum += tile[g * 32 + lane];
    store(out + c, from_float<T>(sum));
  }
}

template <class T>
int launch_column_sum(T* out, const float* part, int rows, int cols, cudaStream_t stream) {
  return launch("column_sum", column_sum<T>, (cols + 31) / 32, kColumnThreads, stream, out, part, rows, cols);
}

}  // namespace mk
