// reduce.h - sums and maxima over a warp and a block. All threads of the block call them, and all get the result.
#pragma once
#include "portable.h"

namespace mk {

struct Sum {
  template <class V>
  static MK_DEVICE V of(V a, V b) {
    return a + b;
  }
};
struct Max {
  static MK_DEVICE float of(float a, float b) { return fmaxf(a, b); }
};

// Two values that are reduced for the price of one.
struct Pair {
  float a, b;
};
MK_DEVICE Pair operator+(Pair x, Pair y) { return {x.a + y.a, x.b + y.b}; }

// The value of the lane whose number differs in the bits of `o`.
template <class V>
MK_DEVICE V other_lane(V x, int o) {
  return __shfl_xor_sync(0xffffffffu, x, o);
}
MK_DEVICE Pair other_lane(Pair x, int o) { return {other_lane(x.a, o), other_lane(x.b, o)}; }

template <class Op, class V>
MK_DEVICE V warp_reduce(V x) {
  MK_UNROLL for (int o = 16; o; o >>= 1) x = Op::of(x, other_lane(x, o));
  return x;
}

// `part` holds a value per warp, in shared memory. It may be used again at once.
template <class Op, int THREADS, class V>
MK_DEVICE V block_reduce(V x, V* part) {
  x = warp_reduce<Op>(x);
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = x;
  MK_SYNC();
  x = part[0];
  MK_UNROLL for (int w = 1; w < THREADS / 32; w++) x = Op::of(x, part[w]);
  MK_SYNC();
  return x;
}

}  // namespace mk
