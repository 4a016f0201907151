// rows.h - kernels in which one block holds a whole row in registers: how many threads, how many elements each.
#pragma once
#include "portable.h"

namespace mk {

// Calls f(threads, elements per thread) for a row of `cols`.
template <int VEC, class F>
int by_columns(int cols, F f) {
  using std::integral_constant;
  if (cols < 1) return kBadSize;
  if (cols <= 1024) return f(integral_constant<int, 128>{}, integral_constant<int, 8>{});
  if (cols <= 4096) return f(integral_constant<int, 256>{}, integral_constant<int, 16>{});
  if constexpr (VEC > 1) {
    if (cols <= 8192) return f(integral_constant<int, 512>{}, integral_constant<int, 16>{});
    if (cols <= 16384) return f(integral_constant<int, 512>{}, integral_constant<int, 32>{});
  }
  return kBadSize;
}

}  // namespace mk
