#include "traffic.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <unordered_set>
#include <utility>
#include <vector>

namespace simt::traffic {
namespace {

constexpr int kWarp = 32;
constexpr uintptr_t kSector = 32;  // bytes: the unit in which a GPU's memory is accessed

struct Counts {
  long launches;
  long loaded, stored;                // bytes, as the threads asked
  long unique_loaded, unique_stored;  // bytes of different sectors: what has to cross the memory bus
  long accesses, wide;                // number of accesses, and of those of 16 bytes
  long sectors, least_sectors;        // touched by the warps' instructions, and how few would hold the same bytes
};

bool on;
Counts counts;
std::unordered_set<uintptr_t> touched[2];
std::vector<std::vector<std::pair<uintptr_t, int>>> logs;  // by thread, of this block

}  // namespace

void begin_launch(int threads) {
  if (!on) return;
  counts.launches++;
  logs.resize(size_t(threads));
}

void note(int thread, const void* p, int bytes, bool store) {
  if (!on) return;
  const uintptr_t at = reinterpret_cast<uintptr_t>(p);
  (store ? counts.stored : counts.loaded) += bytes;
  counts.accesses++;
  counts.wide += bytes == 16;
  for (uintptr_t s = at / kSector; s <= (at + uintptr_t(bytes) - 1) / kSector; s++)
    if (touched[store].insert(s).second) (store ? counts.unique_stored : counts.unique_loaded) += kSector;
  logs[size_t(thread)].emplace_back(at, bytes);
}

// The n-th accesses of a warp's lanes are one instruction where control flow is uniform.
void end_block() {
  if (!on) return;
  for (size_t first = 0; first < logs.size(); first += kWarp) {
    size_t most = 0;
    for (size_t i = first; i < first + kWarp; i++) most = std::max(most, logs[i].size());
    for (size_t n = 0; n < most; n++) {
      std::vector<uintptr_t> sectors;
      long bytes = 0;
      for (size_t i = first; i < first + kWarp; i++) {
        if (n >= logs[i].size()) continue;
        const auto [at, size] = logs[i][n];
        bytes += size;
        for (uintptr_t s = at / kSector; s <= (at + uintptr_t(size) - 1) / kSector; s++) sectors.push_back(s);
      }
      std::sort(sectors.begin(), sectors.end());
      counts.sectors += std::unique(sectors.begin(), sectors.end()) - sectors.begin();
      counts.least_sectors += (bytes + long(kSector) - 1) / long(kSector);
    }
  }
  for (auto& log : logs) log.clear();
}

}  // namespace simt::traffic

// Begin to count from zero.
extern "C" __attribute__((visibility("default"))) void simt_count_traffic() {
  simt::traffic::on = true;
  simt::traffic::counts = {};
  for (auto& set : simt::traffic::touched) set.clear();
}

// Stop, and the nine counts.
extern "C" __attribute__((visibility("default"))) void simt_traffic(long* out) {
  simt::traffic::on = false;
  std::memcpy(out, &simt::traffic::counts, sizeof simt::traffic::counts);
}
