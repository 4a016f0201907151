// traffic.h - counts accesses to global memory while counting is on.
#pragma once
namespace simt::traffic {
void begin_launch(int threads);
void note(int thread, const void* p, int bytes, bool store);
void end_block();
}  // namespace simt::traffic
