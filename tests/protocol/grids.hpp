// A rank's grids as fibers that somebody else resumes, one thread at a time.
#pragma once

#include <algorithm>
#include <deque>

#include "flashinfer_ar/host_fibers.hpp"
#include "world.hpp"

namespace flashinfer_ar::test {

// One grid of one rank, and the scheduler that its threads see.
class RunningGrid : public host::Scheduler {
 public:
  template <const auto& Variants>
  static std::unique_ptr<RunningGrid> start(World& world, std::size_t call, int rank,
                                            uint64_t& num_events) {
    auto grid = std::make_unique<RunningGrid>(call, num_events);
    grid->launch_ =
        Kernels<Variants>::launch(world.call(call), rank, world.params(call, rank), *grid);
    grid->start_threads();
    return grid;
  }

  RunningGrid(std::size_t call, uint64_t& num_events) : call_(call), num_events_(num_events) {}

  std::size_t call() const { return call_; }
  std::size_t num_threads_left() const { return alive_.size(); }
  bool done() const { return alive_.empty(); }

  // The grid before this one has ended.
  void set_first() { is_first_ = true; }

  void resume_one(Random& random) {
    if (num_asleep_ >= alive_.size() || random.one_in(mean_sleep_)) change_sleepers(random);
    KernelThread*& thread = alive_[num_asleep_ + random.below(alive_.size() - num_asleep_)];
    thread->fiber->resume();
    if (!thread->fiber->done()) return;
    idle_fibers().push_back(std::move(thread->fiber));
    std::swap(thread, alive_.back());
    alive_.pop_back();
    progress();
  }

  void yield() override { host::Fiber::suspend(); }
  void progress() override { ++num_events_; }
  void wait_for_previous_grid() override {
    while (!is_first_) yield();
  }

 private:
  struct KernelThread {
    Launch* launch;
    uint32_t index;
    std::unique_ptr<host::Fiber> fiber;
  };

  // In turn, all threads are awake, or some of one warp stop wherever they are while the rest runs
  // on: for so long, sometimes, that the other warps finish a row.
  void change_sleepers(Random& random) {
    mean_sleep_ = 256u << random.below(6);
    num_asleep_ = num_asleep_ == 0 ? gather_sleepers(random) : 0;
    if (num_asleep_ == alive_.size()) num_asleep_ = 0;
  }

  uint32_t gather_sleepers(Random& random) {
    const uint32_t warp = random.below(launch_->num_threads() / kWarpSize);
    const auto of_warp = [warp](const KernelThread* thread) {
      return thread->index / kWarpSize == warp;
    };
    const uint32_t count = std::partition(alive_.begin(), alive_.end(), of_warp) - alive_.begin();
    for (uint32_t i = 0; i < count; ++i) std::swap(alive_[i], alive_[random.below(count)]);
    return random.below(count + 1);
  }

  void start_threads() {
    for (uint32_t i = 0; i < launch_->num_threads(); ++i) {
      threads_.push_back({launch_.get(), i, idle_fiber()});
      alive_.push_back(&threads_.back());
      threads_.back().fiber->start(&RunningGrid::run, &threads_.back());
    }
  }

  static void run(void* argument) {
    const auto* thread = static_cast<const KernelThread*>(argument);
    thread->launch->run_thread(thread->index);
  }

  // Stacks are expensive to map: they are kept for the next grid.
  static std::vector<std::unique_ptr<host::Fiber>>& idle_fibers() {
    static std::vector<std::unique_ptr<host::Fiber>> fibers;
    return fibers;
  }

  static std::unique_ptr<host::Fiber> idle_fiber() {
    if (idle_fibers().empty()) return std::make_unique<host::Fiber>();
    std::unique_ptr<host::Fiber> fiber = std::move(idle_fibers().back());
    idle_fibers().pop_back();
    return fiber;
  }

  std::size_t call_;
  uint64_t& num_events_;
  std::unique_ptr<Launch> launch_;
  std::deque<KernelThread> threads_;  // at addresses that stay
  std::vector<KernelThread*> alive_;  // first those asleep
  uint32_t num_asleep_ = 0;
  uint32_t mean_sleep_ = 1;  // in steps of the grid
  bool is_first_ = false;
};

// A rank that makes one call after the other, each after a random pause; up to `max_grids` at a
// time, where only the oldest has its inputs.
template <const auto& Variants>
class RunningRank {
 public:
  RunningRank(World& world, int rank, std::size_t max_grids, uint64_t& num_events)
      : world_(world), rank_(rank), max_grids_(max_grids), num_events_(num_events) {}

  bool finished() const { return grids_.empty() && num_started_ == world_.num_calls(); }
  std::size_t call() const { return grids_.empty() ? num_started_ : grids_.front()->call(); }
  std::size_t num_threads_left() const {
    return grids_.empty() ? 0 : grids_.front()->num_threads_left();
  }
  bool published() const { return !grids_.empty() && world_.published(call(), rank_); }

  void step(Random& random) {
    if (may_start() && random.one_in(kMeanPause)) start();
    if (grids_.empty()) return;
    RunningGrid& grid = *grids_[random.below(grids_.size())];
    for (int i = random.below(kMaxBurst); i >= 0 && !grid.done(); --i) grid.resume_one(random);
    while (!grids_.empty() && grids_.front()->done()) retire();
  }

 private:
  static constexpr uint32_t kMeanPause = 30;  // steps
  static constexpr uint32_t kMaxBurst = 8;    // threads resumed in one step

  bool may_start() const { return num_started_ < world_.num_calls() && grids_.size() < max_grids_; }

  void start() {
    grids_.push_back(RunningGrid::start<Variants>(world_, num_started_++, rank_, num_events_));
    ++num_events_;
    if (grids_.size() == 1) open_first();
  }

  void retire() {
    world_.check_call(call(), rank_);
    grids_.pop_front();
    if (!grids_.empty()) open_first();
  }

  void open_first() {
    world_.produce_inputs(call(), rank_);
    grids_.front()->set_first();
  }

  World& world_;
  int rank_;
  std::size_t max_grids_;
  uint64_t& num_events_;
  std::deque<std::unique_ptr<RunningGrid>> grids_;
  std::size_t num_started_ = 0;
};

}  // namespace flashinfer_ar::test
