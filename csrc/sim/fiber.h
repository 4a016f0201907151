// fiber.h - a stack of its own that one can switch to and from, on one operating system thread.
// The sanitizers are told of every switch; build fiber.cc and simt.cc without instrumentation.
#pragma once
#include <cstddef>

namespace simt {

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next resume() begins body(arg). A thread of one block is another thread than that of the next block: to a race
  // detector nothing orders them, as on a GPU. So a fiber has two stacks and takes them by turns.
  void prepare(void (*body)(void*), void* arg);
  void resume();         // run it until it calls pause() or its body ends
  void pause(bool last); // back to the caller of resume(); last: for good

 private:
  struct Side {
    char* stack = nullptr;
    void* tsan = nullptr;
  };
  static void enter();

  Side sides_[2];
  int side_ = 0;
  void* sp_ = nullptr;
  void* caller_sp_ = nullptr;
  void* fake_stack_ = nullptr;
  void (*body_)(void*) = nullptr;
  void* arg_ = nullptr;
};

}  // namespace simt
