// The protocol against an adversary: the kernel threads of all ranks are fibers of one OS thread,
// and a seed decides their order and the latency of every word that they store.
//
//   fibers FIRST_SEED NUM_SEEDS [flush] [overlap] [hold=RANK]
//     flush      the CPU flushes subnormals to zero
//     overlap    a rank's next grid starts while its last one runs, as with dependent launch
//     hold=RANK  in every call this rank stops after its publications, until no other rank can move
#include <string_view>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "fabric.hpp"
#include "grids.hpp"

namespace flashinfer_ar::test {

using enum DType;
using enum Epilogue;
using enum Kind;

inline constexpr Variant kVariants[] = {
    {kOneShot, kBFloat16, kNone, kAnyHidden, 1, 1, 1, kUnicast, kRankConstant},
    {kOneShot, kFloat32, kNone, kAnyHidden, 2, 1, 2, kMulticast},
    {kOneShot, kBFloat16, kAddRmsNorm, kAnyHidden, 1, 2, 1, kUnicast},
    {kOneShot, kFloat16, kAddRmsNorm, 40, 2, 1, 1, kMulticast, kRankConstant},
    {kTwoShot, kFloat16, kNone, kAnyHidden, 1, 1, 2, kUnicast},
    {kTwoShot, kBFloat16, kNone, kAnyHidden, 1, 1, 1, kMulticast, kRankConstant},
    {kTwoShot, kFloat32, kAddRmsNorm, 33, 1, 2, 2, kUnicast, kRankConstant},
    {kTwoShot, kBFloat16, kAddRmsNorm, kAnyHidden, 2, 1, 1, kMulticast},
};

struct Options {
  bool overlap = false;
  int held_rank = -1;
};

// All calls of all ranks, for one seed.
class Run {
 public:
  Run(uint64_t seed, const Options& options)
      : random_(seed),
        world_(seed, random_calls(random_, seed, kVariants, kMaxClusters)),
        fabric_(world_, random_),
        held_rank_(options.held_rank) {
    for (int rank = 0; rank < kWorldSize; ++rank) {
      ranks_.emplace_back(world_, rank, options.overlap ? 2 : 1, num_events_);
    }
    host::fabric = &fabric_;
  }

  void to_the_end() {
    while (!finished()) {
      if (now_ % kPacePeriod == 0) change_pace();
      num_events_ += fabric_.deliver_until(++now_);
      const int rank = random_.below(kWorldSize);
      if (may_run(rank)) ranks_[rank].step(random_);
      watch();
    }
    fabric_.deliver_until(UINT64_MAX);
    world_.check_at_rest();
  }

 private:
  static constexpr uint32_t kMaxClusters = 2;
  // In steps. It is a hang when for long nothing has happened: no word arrived, no thread ended.
  static constexpr uint64_t kPacePeriod = 2048;
  static constexpr uint64_t kHold = 5'000;
  static constexpr uint64_t kHang = 300'000;

  bool finished() const {
    for (const auto& rank : ranks_) {
      if (!rank.finished()) return false;
    }
    return true;
  }

  // For a while each rank runs at full speed, slowly, or hardly at all.
  void change_pace() {
    static constexpr uint32_t kSlowness[] = {1, 1, 8, 4096};
    for (uint32_t& slowness : slowness_) slowness = kSlowness[random_.below(4)];
  }

  bool may_run(int rank) {
    if (ranks_[rank].finished()) return false;
    if (rank == held_rank_) return !is_held(ranks_[rank]);
    return random_.one_in(slowness_[rank]);
  }

  // Held from its publications on until for long nothing has happened, then free for this call.
  bool is_held(const RunningRank<kVariants>& rank) {
    if (!rank.published() || rank.call() == released_call_) return false;
    if (now_ - last_event_ < kHold) return true;
    released_call_ = rank.call();
    return false;
  }

  void watch() {
    if (num_events_ != num_events_seen_) last_event_ = now_;
    num_events_seen_ = num_events_;
    if (now_ - last_event_ < kHang) return;
    for (int rank = 0; rank < kWorldSize; ++rank) {
      std::fprintf(stderr, "rank %d is in call %zu with %zu threads left\n", rank,
                   ranks_[rank].call(), ranks_[rank].num_threads_left());
    }
    fail("hang: %zu words are in flight", fabric_.num_in_flight());
  }

  Random random_;
  World world_;
  AdverseFabric fabric_;
  int held_rank_;
  std::size_t released_call_ = SIZE_MAX;
  std::deque<RunningRank<kVariants>> ranks_;
  std::array<uint32_t, kWorldSize> slowness_;
  uint64_t now_ = 0, last_event_ = 0, num_events_ = 0, num_events_seen_ = 0;
};

void flush_subnormals() {
#if defined(__SSE__)
  _mm_setcsr(_mm_getcsr() | 0x8040);  // FTZ, DAZ
#elif defined(__aarch64__)
  __builtin_aarch64_set_fpcr(__builtin_aarch64_get_fpcr() | 1 << 24);  // FZ
#else
#error "How does this CPU flush subnormals?"
#endif
}

Options parse(int num_options, char** options) {
  Options parsed;
  for (int i = 0; i < num_options; ++i) {
    const std::string_view option = options[i];
    if (option == "flush") flush_subnormals();
    if (option == "overlap") parsed.overlap = true;
    if (option.starts_with("hold=")) parsed.held_rank = std::atoi(options[i] + 5);
  }
  return parsed;
}

}  // namespace flashinfer_ar::test

int main(int argc, char** argv) {
  using namespace flashinfer_ar::test;
  const Options options = parse(argc - 3, argv + 3);
  const uint64_t first = std::strtoull(argv[1], nullptr, 10);
  const uint64_t count = std::strtoull(argv[2], nullptr, 10);
  for (current_seed = first; current_seed < first + count; ++current_seed) {
    Run(current_seed, options).to_the_end();
  }
  std::printf("%llu seeds\n", static_cast<unsigned long long>(count));
}
