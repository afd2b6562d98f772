// Fibers: many kernel threads in one OS thread, each with its own stack, switched by hand.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>

namespace flashinfer_ar::host {

// A fiber runs one function after another: `start` gives it the next one, `resume` runs it until it
// suspends itself or the function returns. makecontext builds the first frame; after that _setjmp
// and _longjmp switch, which unlike swapcontext make no system call.
class Fiber {
 public:
  Fiber() {
    stack_ = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK | MAP_NORESERVE, -1, 0);
    // The lowest page is a guard: an overflow is a fault here, not damage elsewhere.
    if (stack_ == MAP_FAILED || mprotect(stack_, kGuardBytes, PROT_NONE) != 0) {
      std::perror("flashinfer_ar: cannot map a fiber's stack");
      std::abort();
    }
    getcontext(&first_frame_);
    first_frame_.uc_stack.ss_sp = stack_;
    first_frame_.uc_stack.ss_size = kStackBytes;
    first_frame_.uc_link = nullptr;
    makecontext(&first_frame_, &Fiber::serve, 0);
  }
  ~Fiber() { munmap(stack_, kStackBytes); }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  void start(void (*function)(void*), void* argument) {
    function_ = function;
    argument_ = argument;
    done_ = false;
  }

  bool done() const { return done_; }

  void resume() {
    running() = this;
    if (_setjmp(resumer_) != 0) return;
    if (has_frame_) _longjmp(suspended_, 1);
    has_frame_ = true;
    setcontext(&first_frame_);
  }

  static void suspend() {
    Fiber* self = running();
    if (_setjmp(self->suspended_) == 0) _longjmp(self->resumer_, 1);
  }

 private:
  static constexpr std::size_t kGuardBytes = 4096;
  static constexpr std::size_t kStackBytes = 256 * 1024 + kGuardBytes;

  static Fiber*& running() {
    thread_local Fiber* fiber = nullptr;
    return fiber;
  }

  static void serve() {
    Fiber* self = running();
    while (true) {
      self->function_(self->argument_);
      self->done_ = true;
      suspend();
    }
  }

  void* stack_;
  ucontext_t first_frame_;
  jmp_buf suspended_, resumer_;
  void (*function_)(void*) = nullptr;
  void* argument_ = nullptr;
  bool has_frame_ = false;
  bool done_ = true;
};

}  // namespace flashinfer_ar::host
