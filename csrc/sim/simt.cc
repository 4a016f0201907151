// simt.cc - the scheduler behind simt.h. Built without sanitizer instrumentation; -DSIMT_ASAN and -DSIMT_TSAN tell the
// sanitizers about stacks, shared memory and barriers.
#include "simt.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fiber.h"
#include "traffic.h"

#if defined(SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#endif
#if defined(SIMT_TSAN)
#include <sanitizer/tsan_interface.h>
#define SIMT_RELEASE(p) __tsan_release(p)
#define SIMT_ACQUIRE(p) __tsan_acquire(p)
#else
#define SIMT_RELEASE(p) (void)(p)
#define SIMT_ACQUIRE(p) (void)(p)
#endif

namespace simt {

uint3 thread_index, block_index;
dim3 block_size, grid_size;

namespace {

enum class State : char { kReady, kAtBarrier, kAtExchange, kDone };
enum Order { kForward, kReverse, kRandom };
constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr size_t kSharedMemory = 64 << 10;  // more than a kernel may declare

struct Thread {
  Fiber fiber;
  uint3 index{};
  int number = 0;
  State state = State::kDone;
  unsigned exchanges = 0;
  const char* file = nullptr;  // where it waits
  int line = 0;
};

struct Warp {
  unsigned arrived = 0;
  unsigned priority = 0;
  uint64_t slot[2][kWarp];  // by turns: one wait per exchange
};

struct Array {
  const void* key;
  void* at;
};

std::mutex one_launch;
std::vector<std::unique_ptr<Thread>>& threads = *new std::vector<std::unique_ptr<Thread>>;  // lives to the end: so do stacks
std::vector<Thread*> ready;
std::vector<Warp> warps;
std::vector<Array> arrays;
std::vector<void*> old_arenas;
Thread* running;
int count, waiting, done;
const char* kernel_name;
void (*kernel)(void*);
void* kernel_arg;
unsigned char* arena;
size_t arena_used;
char launch_start, launch_end;
Order order = kForward;
uint64_t random_state = 0x9e3779b97f4a7c15;
std::string mutant;

uint64_t next_random() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  return random_state ^= random_state << 17;
}

const char* base_name(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash ? slash + 1 : path;
}

[[noreturn]] void die(const char* what) {
  std::fprintf(stderr, "simt: %s: %s in block (%u, %u)\n", kernel_name, what, block_index.x, block_index.y);
  static const char* const kStates[] = {"is ready", "waits at a barrier", "waits at an exchange", "has ended"};
  const Thread* last = nullptr;
  for (int i = 0, shown = 0; i < count && shown < 8; i++) {
    const Thread& t = *threads[i];
    if (last && last->state == t.state && last->line == t.line) continue;
    const bool waits = t.state == State::kAtBarrier || t.state == State::kAtExchange;
    std::fprintf(stderr, "  from thread %d on: %s", i, kStates[int(t.state)]);
    if (waits) std::fprintf(stderr, ", %s:%d", base_name(t.file), t.line);
    std::fputc('\n', stderr);
    last = &t, shown++;
  }
  std::fflush(stderr);
  std::abort();
}

void wake(Thread* t) {
  t->state = State::kReady;
  ready.push_back(t);
}

Thread* next_thread() {
  size_t pick = 0;  // forward: in turn
  if (order == kReverse) pick = ready.size() - 1;  // the latest woken: one warp runs as far ahead as it can
  if (order == kRandom) {                          // some warps far ahead of others
    unsigned best = 0;
    for (size_t i = 0; i < ready.size(); i++) {
      const unsigned p = warps[ready[i]->number / kWarp].priority + (next_random() & 7);
      if (p >= best) best = p, pick = i;
    }
  }
  Thread* t = ready[pick];
  ready.erase(ready.begin() + long(pick));
  return t;
}

void thread_main(void*) {
  SIMT_ACQUIRE(&launch_start);
  SIMT_ACQUIRE(arena);
  kernel(kernel_arg);
  SIMT_RELEASE(&launch_end);
  running->state = State::kDone;
  done++;
}

// Shared memory: NaN at first; with the address sanitizer of exact size; for the race detector another one for each block.
void new_arena() {
#if defined(SIMT_TSAN)
  if (arena) old_arenas.push_back(arena);
  arena = nullptr;
#endif
  if (!arena) {
    arena = static_cast<unsigned char*>(std::aligned_alloc(128, kSharedMemory));
    arena_used = kSharedMemory;
  }
#if defined(SIMT_ASAN)
  __asan_unpoison_memory_region(arena, kSharedMemory);
#endif
  std::memset(arena, 0xff, arena_used);
#if defined(SIMT_ASAN)
  __asan_poison_memory_region(arena, kSharedMemory);
#endif
  SIMT_RELEASE(arena);
  arena_used = 128;  // the first bytes stand for the barrier
  arrays.clear();
}

void run_block() {
  waiting = done = 0;
  ready.clear();
  for (Warp& w : warps) w.arrived = 0, w.priority = unsigned(next_random() % 64);
  for (int i = 0; i < count; i++) {
    Thread* t = threads[i].get();
    t->fiber.prepare(thread_main, nullptr);
    t->exchanges = 0, t->line = 0, t->file = "";
    wake(t);
  }
  while (done < count) {
    if (ready.empty()) die(waiting ? "a barrier that not all threads reach" : "no thread can go on");
    running = next_thread();
    thread_index = running->index;
    running->fiber.resume();
  }
  for (const Warp& w : warps)
    if (w.arrived) die("an exchange that not all lanes reach");
  traffic::end_block();
}

void wait_as(State state) {
  running->state = state;
  running->fiber.pause(false);
}

}  // namespace

void sync_block(const char* file, int line) {
  Thread* me = running;
  me->file = file, me->line = line;
  for (int i = 0; waiting && i < count; i++)
    if (threads[i]->state == State::kAtBarrier) {
      if (threads[i]->line != line || threads[i]->file != file) die("threads meet at different barriers");
      break;
    }
  SIMT_RELEASE(arena + 64);
  if (++waiting == count) {
    waiting = 0;
    for (int i = 0; i < count; i++)
      if (threads[i].get() != me) wake(threads[i].get());
    wake(me);
    me->fiber.pause(false);
  } else {
    wait_as(State::kAtBarrier);
  }
  SIMT_ACQUIRE(arena + 64);
}

// An exchange of values does not order accesses to memory.
void exchange(uint64_t* value, int lane, const char* file, int line) {
  Thread* me = running;
  Warp& w = warps[me->number / kWarp];
  const int slot = ++me->exchanges & 1, first = me->number / kWarp * kWarp;
  me->file = file, me->line = line;
  w.slot[slot][me->number % kWarp] = *value;
  w.arrived |= 1u << me->number % kWarp;
  if (w.arrived == 0xffffffffu) {
    w.arrived = 0;
    for (int i = first; i < first + kWarp; i++) {
      if (threads[i].get() == me) continue;
      if (threads[i]->line != line || threads[i]->file != file) die("lanes of a warp meet at different exchanges");
      wake(threads[i].get());
    }
  } else {
    wait_as(State::kAtExchange);
  }
  *value = w.slot[slot][lane];
}

int lane_id() { return running->number % kWarp; }

void* shared(const void* key, size_t bytes) {
  for (const Array& a : arrays)
    if (a.key == key) return a.at;
  unsigned char* p = arena + arena_used;
  arena_used += (bytes + 127) / 128 * 128 + 128;
  if (arena_used > kSharedMemory) die("more shared memory than a block has");
#if defined(SIMT_ASAN)
  __asan_unpoison_memory_region(p, bytes);
#endif
  arrays.push_back({key, p});
  return p;
}

void note(const void* p, int bytes, bool store) { traffic::note(running->number, p, bytes, store); }

bool mutated(const char* file, int line) {
  return !mutant.empty() && mutant == std::string(base_name(file)) + ":" + std::to_string(line);
}

void launch(const char* name, dim3 grid, dim3 block, void (*body)(void*), void* arg) {
  const std::lock_guard<std::mutex> hold(one_launch);
  kernel_name = name, kernel = body, kernel_arg = arg, grid_size = grid, block_size = block;
  count = int(block.x * block.y * block.z);
  if (count < 1 || count > kMaxThreads || count % kWarp) die("a launch with a bad block size");
  while (int(threads.size()) < count) threads.push_back(std::make_unique<Thread>());
  for (int i = 0; i < count; i++) {
    threads[i]->number = i, threads[i]->state = State::kDone;
    threads[i]->index = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
  }
  warps.assign(size_t(count) / kWarp, Warp{});
  traffic::begin_launch(count);
  SIMT_RELEASE(&launch_start);
  std::vector<unsigned> blocks(size_t(grid.x) * grid.y * grid.z);
  for (size_t i = 0; i < blocks.size(); i++) blocks[i] = unsigned(i);
  if (order == kReverse) std::reverse(blocks.begin(), blocks.end());
  for (size_t i = blocks.size(); order == kRandom && i > 1; i--) std::swap(blocks[i - 1], blocks[next_random() % i]);
  for (unsigned n : blocks) {
    block_index = {n % grid.x, n / grid.x % grid.y, n / (grid.x * grid.y)};
    new_arena();
    run_block();
  }
  SIMT_ACQUIRE(&launch_end);
  for (void* p : old_arenas) std::free(p);
  old_arenas.clear();
}

}  // namespace simt

#define SIMT_API extern "C" __attribute__((visibility("default")))

// The order in which threads and blocks run: 0 forward, 1 reverse, 2 random.
SIMT_API void simt_set_order(int order, uint64_t seed) {
  simt::order = simt::Order(order);
  simt::random_state = seed * 0x9e3779b97f4a7c15 + 1;
}

// Plant the fault at "file:line"; "" plants none. Only in a build with -DMEGAKIT_MUTANTS.
SIMT_API void simt_set_mutant(const char* place) { simt::mutant = place; }

// For a test of the conversions: dtype 1 bf16, 2 fp16; back: from `narrow` to `wide`.
SIMT_API void simt_convert(float* wide, uint16_t* narrow, long n, int dtype, int back) {
  for (long i = 0; i < n; i++) {
    if (back)
      wide[i] = dtype == 1 ? simt::widen(simt::bf16{narrow[i]}) : simt::widen(simt::half{narrow[i]});
    else
      narrow[i] = dtype == 1 ? simt::narrow_bf16(wide[i]).bits : simt::narrow_half(wide[i]).bits;
  }
}
