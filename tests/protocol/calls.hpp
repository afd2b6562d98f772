// What the ranks of a protocol test call: kernel instances, and lists of calls of them.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "flashinfer_ar/oneshot.cuh"
#include "flashinfer_ar/twoshot.cuh"
#include "random.hpp"

namespace flashinfer_ar::test {

inline constexpr int kWorldSize = WORLD_SIZE;  // a program is compiled for one

enum class Kind { kOneShot, kTwoShot };
enum class DType { kFloat32, kFloat16, kBFloat16 };

inline constexpr bool kUnicast = false, kMulticast = true;
inline constexpr bool kRankConstant = true;

// A kernel instance, but for world size and rank.
struct Variant {
  Kind kind;
  DType dtype;
  Epilogue epilogue;
  int hidden_packs;  // or kAnyHidden
  int warps;
  int cluster;
  int packs_per_thread;
  bool multicast;
  bool rank_constant = false;  // else all ranks share one instance

  constexpr Config config(int rank) const {
    return {kWorldSize,
            rank_constant ? rank : kAnyRank,
            hidden_packs,
            warps,
            cluster,
            packs_per_thread,
            1,
            multicast,
            epilogue};
  }
};

struct Call {
  Variant variant;
  std::size_t variant_index;
  uint32_t num_tokens;
  uint32_t hidden_packs;
  // Of each rank's grid: the protocol does not need them to agree.
  std::array<uint32_t, kWorldSize> num_clusters;

  uint32_t num_packs() const { return num_tokens * hidden_packs; }

  uint32_t num_rows() const {
    const uint32_t capacity = variant.config(0).row_capacity();
    if (variant.epilogue != Epilogue::kNone) return num_tokens;
    return (num_packs() + capacity - 1) / capacity;
  }

  uint32_t num_slots() const {
    if (variant.kind == Kind::kOneShot) return kWorldSize * num_packs();
    const uint32_t stripes = (num_packs() + kWarpSize - 1) / kWarpSize;
    const uint32_t owned = (stripes + kWorldSize - 1) / kWorldSize;
    return kWorldSize * owned * kWarpSize + num_packs();
  }
};

// A list for a seed. Even seeds keep one kernel and hidden size for four calls, so that only the
// token count changes; odd seeds change everything at every call.
template <std::size_t Count>
std::vector<Call> random_calls(Random& random, uint64_t seed, const Variant (&variants)[Count],
                               uint32_t max_clusters) {
  static constexpr uint32_t kTokens[] = {2, 1, 1, 2, 2, 1, 2, 2, 3, 1, 4, 2};
  static constexpr uint32_t kHiddenPacks[] = {1, 5, 33, 40, 64};
  std::vector<Call> calls;
  for (const uint32_t num_tokens : kTokens) {
    Call call{};
    if (seed % 2 == 0 && calls.size() % 4 != 0) {
      call = calls.back();
    } else {
      call.variant_index = random.below(Count);
      call.variant = variants[call.variant_index];
      call.hidden_packs = call.variant.hidden_packs;
      if (call.hidden_packs == kAnyHidden) call.hidden_packs = kHiddenPacks[random.below(5)];
    }
    call.num_tokens = num_tokens;
    for (uint32_t& clusters : call.num_clusters) {
      clusters = 1 + random.below(call.num_rows() < max_clusters ? call.num_rows() : max_clusters);
    }
    calls.push_back(call);
  }
  return calls;
}

}  // namespace flashinfer_ar::test
