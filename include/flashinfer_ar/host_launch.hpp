// Launching a grid on the host: its threads as fibers of the calling OS thread.
#pragma once

#include <fenv.h>
#include <sched.h>

#include "flashinfer_ar/host_fibers.hpp"
#include "flashinfer_ar/platform_host.hpp"

// The entry returns when the grid has ended.
#define FAR_KERNEL(name, Kernel)                                                                  \
  extern "C" __attribute__((visibility("default"))) void name(const Kernel::Params* params,       \
                                                              flashinfer_ar::uint32_t num_ctas) { \
    flashinfer_ar::host::launch<Kernel>(*params, num_ctas);                                       \
  }

namespace flashinfer_ar::host {

// One launch of a kernel: its CTAs' shared memory and barriers. Each thread is run once.
template <typename Kernel>
class Grid {
 public:
  Grid(const typename Kernel::Params& params, uint32_t num_ctas, Scheduler& scheduler)
      : params_(params),
        shared_(new typename Kernel::Shared[num_ctas]),
        warps_(new Warp[num_ctas * Kernel::kThreads / kWarpSize]),
        state_{&scheduler, num_ctas, Kernel::kThreads, sizeof(typename Kernel::Shared), warps_} {}
  ~Grid() {
    delete[] warps_;
    delete[] shared_;
  }
  Grid(const Grid&) = delete;
  Grid& operator=(const Grid&) = delete;

  uint32_t num_threads() const { return state_.num_ctas * Kernel::kThreads; }

  void run_thread(uint32_t thread_in_grid) {
    const Thread t(state_, thread_in_grid);
    Kernel::run(t, shared_[t.cta()], params_);
  }

 private:
  const typename Kernel::Params& params_;
  typename Kernel::Shared* shared_;
  Warp* warps_;
  GridState state_;
};

// A kernel's arithmetic is IEEE with subnormals, whatever the calling thread has set.
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() {
    fegetenv(&before_);
    fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatingPoint() { fesetenv(&before_); }

 private:
  fenv_t before_;
};

// An OS thread's fibers, kept from launch to launch. (<deque> would do, and takes a quarter of a
// kernel's build.)
class Fibers {
 public:
  Fibers() = default;
  ~Fibers() {
    for (uint32_t i = 0; i < size_; ++i) delete fibers_[i];
    delete[] fibers_;
  }
  Fibers(const Fibers&) = delete;
  Fibers& operator=(const Fibers&) = delete;

  Fiber& operator[](uint32_t i) { return *fibers_[i]; }

  void grow_to(uint32_t size) {
    if (size <= size_) return;
    Fiber** grown = new Fiber*[size];
    for (uint32_t i = 0; i < size; ++i) grown[i] = i < size_ ? fibers_[i] : new Fiber;
    delete[] fibers_;
    fibers_ = grown;
    size_ = size;
  }

 private:
  Fiber** fibers_ = nullptr;
  uint32_t size_ = 0;
};

// Resumes fibers in turn until all are done.
class FiberScheduler : public Scheduler {
 public:
  template <typename Body>
  void run(uint32_t num_threads, const Body& body) {
    struct Job {
      const Body* body;
      uint32_t thread;
    };
    Job* jobs = new Job[num_threads];
    Fibers& fibers = own_fibers();
    fibers.grow_to(num_threads);
    for (uint32_t i = 0; i < num_threads; ++i) {
      jobs[i] = {&body, i};
      fibers[i].start(
          [](void* argument) {
            const Job& job = *static_cast<Job*>(argument);
            (*job.body)(job.thread);
          },
          &jobs[i]);
    }
    for (uint32_t alive = num_threads; alive > 0;) {
      progress_ = false;
      alive = resume_each(fibers, num_threads);
      if (!progress_) sched_yield();  // all wait for peers, which may need this core
    }
    delete[] jobs;
  }

  void yield() override { Fiber::suspend(); }
  void progress() override { progress_ = true; }

 private:
  static Fibers& own_fibers() {
    thread_local Fibers fibers;
    return fibers;
  }

  uint32_t resume_each(Fibers& fibers, uint32_t num_threads) {
    uint32_t alive = 0;
    for (uint32_t i = 0; i < num_threads; ++i) {
      if (fibers[i].done()) continue;
      fibers[i].resume();
      if (fibers[i].done()) progress_ = true;
      alive += !fibers[i].done();
    }
    return alive;
  }

  bool progress_ = false;
};

// The fences are what the start and the end of a grid are on a GPU (lamport.cuh relies on them).
template <typename Kernel>
void launch(const typename Kernel::Params& params, uint32_t num_ctas) {
  const DefaultFloatingPoint floating_point;
  FiberScheduler scheduler;
  Grid<Kernel> grid(params, num_ctas, scheduler);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  scheduler.run(grid.num_threads(), [&grid](uint32_t thread) { grid.run_thread(thread); });
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

}  // namespace flashinfer_ar::host
