// The protocol with one OS thread for each kernel thread: for ThreadSanitizer, and for real
// interleavings.
//
//   threads FIRST_SEED NUM_SEEDS
#include <unistd.h>

#include <chrono>
#include <thread>

#include "world.hpp"

namespace flashinfer_ar::test {

using enum DType;
using enum Epilogue;
using enum Kind;

inline constexpr Variant kVariants[] = {
    {kOneShot, kBFloat16, kNone, kAnyHidden, 1, 1, 1, kUnicast},
    {kOneShot, kFloat16, kAddRmsNorm, kAnyHidden, 1, 2, 1, kMulticast},
    {kTwoShot, kFloat32, kAddRmsNorm, kAnyHidden, 1, 2, 1, kUnicast},
    {kTwoShot, kBFloat16, kNone, kAnyHidden, 2, 1, 1, kMulticast},
};
constexpr uint32_t kMaxClusters = 1;
constexpr unsigned kDeadlineS = 90;

// Longer than a grid of this program takes from its start to its first store.
constexpr std::chrono::milliseconds kLongSleep(5);

class YieldingScheduler : public host::Scheduler {
 public:
  void yield() override { std::this_thread::yield(); }
  void progress() override {}
};

// Stores at once; has multicast, and now and then the storing thread sleeps after a store, so that
// its rank's other threads, or other ranks, wait, read and re-arm before it does.
class SleepyFabric : public host::Fabric {
 public:
  explicit SleepyFabric(World& world) : world_(world) {}

  void store(Pack* to, const Pack& pack) override {
    world_.rank_of(to);
    store_own_relaxed_system(to, pack);
    maybe_sleep();
  }

  void multicast_store(Pack* to, const Pack& pack) override {
    for (int rank = 0; rank < kWorldSize; ++rank) {
      store_own_relaxed_system(world_.through_multicast(to, rank), pack);
    }
    maybe_sleep();
  }

 private:
  static void maybe_sleep() {
    thread_local Random random(hash_of(current_seed, gettid()));
    if (random.one_in(200)) std::this_thread::sleep_for(kLongSleep);
  }

  World& world_;
};

void run_call(World& world, std::size_t index, int rank, host::Scheduler& scheduler) {
  world.produce_inputs(index, rank);
  const auto launch =
      Kernels<kVariants>::launch(world.call(index), rank, world.params(index, rank), scheduler);
  std::vector<std::jthread> threads;
  for (uint32_t i = 0; i < launch->num_threads(); ++i) {
    threads.emplace_back([&launch, i] { launch->run_thread(i); });
  }
  threads.clear();  // joins them: the grid has ended
  world.check_call(index, rank);
}

void run_rank(World& world, uint64_t seed, int rank) {
  YieldingScheduler scheduler;
  Random random(hash_of(seed, rank));
  for (std::size_t index = 0; index < world.num_calls(); ++index) {
    run_call(world, index, rank, scheduler);
    if (random.one_in(3)) std::this_thread::sleep_for(kLongSleep);
  }
}

void run(uint64_t seed) {
  Random random(seed);
  World world(seed, random_calls(random, seed, kVariants, kMaxClusters));
  SleepyFabric fabric(world);
  host::fabric = &fabric;
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < kWorldSize; ++rank) {
    ranks.emplace_back([&world, seed, rank] { run_rank(world, seed, rank); });
  }
  ranks.clear();
  world.check_at_rest();
}

}  // namespace flashinfer_ar::test

int main(int, char** argv) {
  using namespace flashinfer_ar::test;
  alarm(kDeadlineS);  // ends the program, whatever hangs
  const uint64_t first = std::strtoull(argv[1], nullptr, 10);
  const uint64_t count = std::strtoull(argv[2], nullptr, 10);
  for (current_seed = first; current_seed < first + count; ++current_seed) run(current_seed);
  std::printf("%llu seeds\n", static_cast<unsigned long long>(count));
}
