#include "fiber.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#if defined(SIMT_ASAN)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(SIMT_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

#if !defined(__x86_64__)
#error "the host emulation has a context switch for x86-64 only"
#endif

// Saves the registers that a call preserves, then the stack pointer in *save, and takes up what was saved at `load`.
asm(R"(
.text
.globl simt_switch
.type simt_switch,@function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch,.-simt_switch
)");
extern "C" void simt_switch(void** save, void* load);

namespace simt {
namespace {
constexpr size_t kStack = 64 << 10;
constexpr size_t kGuard = 4096;
Fiber* starting;  // the fiber that resume() switches to
#if defined(SIMT_ASAN)
const void* caller_stack;
size_t caller_size;
#endif
#if defined(SIMT_TSAN)
void* caller_tsan;
#endif
}  // namespace

Fiber::Fiber() {
  for (Side& side : sides_) {
    void* p = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || mprotect(p, kGuard, PROT_NONE)) {  // an overflow of the stack faults
      std::perror("simt: no stack");
      std::abort();
    }
    side.stack = static_cast<char*>(p);
#if defined(SIMT_TSAN)
    side.tsan = __tsan_create_fiber(0);
#endif
  }
}

Fiber::~Fiber() {
  for (Side& side : sides_) {
    munmap(side.stack, kStack);
#if defined(SIMT_TSAN)
    __tsan_destroy_fiber(side.tsan);
#endif
  }
}

void Fiber::prepare(void (*body)(void*), void* arg) {
  body_ = body, arg_ = arg, side_ ^= 1, fake_stack_ = nullptr;
  void** sp = reinterpret_cast<void**>(sides_[side_].stack + kStack);
  *--sp = nullptr;  // a return address for enter(): it keeps the stack aligned
  *--sp = reinterpret_cast<void*>(&Fiber::enter);
  for (int saved = 0; saved < 6; saved++) *--sp = nullptr;
  sp_ = sp;
}

void Fiber::resume() {
  starting = this;
#if defined(SIMT_ASAN)
  void* fake;
  __sanitizer_start_switch_fiber(&fake, sides_[side_].stack, kStack);
#endif
#if defined(SIMT_TSAN)
  caller_tsan = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(sides_[side_].tsan, __tsan_switch_to_fiber_no_sync);
#endif
  simt_switch(&caller_sp_, sp_);
#if defined(SIMT_ASAN)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void Fiber::pause(bool last) {
  (void)last;
#if defined(SIMT_TSAN)
  __tsan_switch_to_fiber(caller_tsan, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(SIMT_ASAN)
  __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack_, caller_stack, caller_size);
#endif
  simt_switch(&sp_, caller_sp_);
#if defined(SIMT_ASAN)
  __sanitizer_finish_switch_fiber(fake_stack_, &caller_stack, &caller_size);
#endif
}

void Fiber::enter() {
  Fiber* me = starting;
#if defined(SIMT_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, &caller_stack, &caller_size);
#endif
  me->body_(me->arg_);
  me->pause(true);
  std::abort();  // nobody resumes it again
}

}  // namespace simt
