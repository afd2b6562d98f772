// The ranks of one run: their rings, control words and tensors, and what must hold of them.
#pragma once

#include <algorithm>

#include "kernels.hpp"
#include "reference.hpp"

namespace flashinfer_ar::test {

inline constexpr float kEpsilon = 1e-5f;
inline constexpr float kWeightBias = 1.0f;

// Inputs tell call, rank and place apart, so that stale data gives another sum. Among them are all
// the words that the protocol must not take for something else.
class Inputs {
 public:
  Inputs(uint64_t seed, std::size_t call_index, const Call& call)
      : key_(hash_of(seed, call_index)), call_(call) {}

  // `source` is a rank, or any other number for a tensor that all ranks share.
  Tensor tensor(int source, uint32_t num_packs) const {
    Tensor packs(num_packs);
    for (uint32_t i = 0; i < num_packs * kWordsPerPack; ++i) {
      const uint32_t pack = i / kWordsPerPack, word = i % kWordsPerPack;
      packs[pack].words[word] = at(source, pack, word);
    }
    return packs;
  }

 private:
  uint32_t at(int source, uint32_t pack, uint32_t word) const {
    switch (hash_of(key_, pack) % 8) {  // the same on all ranks
      case 0:
        return wide() ? kSentinel : 0x80008000u;  // -0.0 everywhere
      case 1:
        return kSentinel;  // as a pair of 16-bit elements, (+0.0, -0.0)
      case 2:              // sums to a negative subnormal; where those are flushed, to -0.0
        return source == 0 ? 0x00800000u : source == 1 ? 0x80a00000u : kSentinel;
    }
    const uint64_t hash = hash_of(key_, source, pack, word);
    if (wide()) return element(hash, hash >> 32, kSpecial32, pack, 0x3c000000u);
    const uint32_t low = element(hash, hash >> 32, kSpecial16, pack, ordinary_16());
    return low | element(hash >> 16, hash >> 40, kSpecial16, pack, ordinary_16()) << 16;
  }

  bool wide() const { return call_.variant.dtype == DType::kFloat32; }
  uint32_t ordinary_16() const {
    return call_.variant.dtype == DType::kFloat16 ? 0x3000u : 0x3c00u;
  }

  // Mostly a value of either sign in a few binades above `ordinary`, else one of `special`.
  template <std::size_t Count>
  uint32_t element(uint32_t bits, uint32_t choice, const uint32_t (&special)[Count], uint32_t pack,
                   uint32_t ordinary) const {
    const uint32_t sign = wide() ? 0x80000000u : 0x8000u;
    if (choice % 8 != 0) return (ordinary + (bits & (ordinary >> 3))) | (bits & sign);
    const uint32_t count = may_be_infinite(pack) ? Count : kNumFinite;
    return special[choice / 8 % 32 % count];
  }

  // A NaN spreads over its row, where it would hide other faults: few rows have any.
  bool may_be_infinite(uint32_t pack) const {
    if (call_.variant.epilogue == Epilogue::kNone) return true;
    return hash_of(key_, pack / call_.hidden_packs, 1) % 4 == 0;
  }

  static constexpr uint32_t kNumFinite = 4;
  static constexpr uint32_t kSpecial16[] = {0x8000, 0x0000, 0x8001, 0x807f, 0x7fc0, 0xffc0,
                                            0x7f81, 0xffff, 0x7f80, 0xff80, 0x7c00, 0xfc00};
  static constexpr uint32_t kSpecial32[] = {0x80000000, 0x00000000, 0x80000001, 0x807fffff,
                                            0x7fc00000, 0xffc00000, 0x7f800001, 0xffffffff,
                                            0x7f800000, 0xff800000};

  uint64_t key_;
  const Call& call_;
};

class World {
 public:
  World(uint64_t seed, const std::vector<Call>& calls) {
    for (const Call& call : calls) {
      generation_packs_ = std::max(generation_packs_, call.num_slots());
      runs_.emplace_back(call, Inputs(seed, runs_.size(), call));
    }
    const Tensor armed(kRingGenerations * generation_packs_, uniform_pack(kSentinel));
    rings_.fill(armed);
    multicast_ = armed;
  }

  std::size_t num_calls() const { return runs_.size(); }
  const Call& call(std::size_t index) const { return runs_[index].call; }

  // What the call reads exists only from the end of the call before: a grid that is there earlier
  // reads NaN.
  void produce_inputs(std::size_t index, int rank) {
    Run& run = runs_[index];
    run.tensors[rank].input = run.inputs[rank];
    run.tensors[rank].residual_in = run.residual;
  }

  Params<kWorldSize> params(std::size_t index, int rank) {
    Run& run = runs_[index];
    Tensors& tensors = run.tensors[rank];
    Params<kWorldSize> params{};
    params.input = tensors.input.data();
    params.output = tensors.output.data();
    params.residual_in = tensors.residual_in.data();
    params.residual_out = tensors.residual_out.data();
    params.gamma = run.gamma.data();
    for (int peer = 0; peer < kWorldSize; ++peer) params.rings[peer] = rings_[peer].data();
    params.multicast = multicast_.data();
    params.control = &controls_[rank];
    params.timeout_record = &records_[rank];
    params.timeout_ns = UINT64_MAX;
    params.generation_packs = generation_packs_;
    params.num_tokens = run.call.num_tokens;
    params.hidden_packs = run.call.hidden_packs;
    params.rank = rank;
    params.epsilon = kEpsilon;
    params.weight_bias = kWeightBias;
    return params;
  }

  void check_call(std::size_t index, int rank) const {
    const Run& run = runs_[index];
    check_tensor(run.tensors[rank].output, run.expected.output, "output", index, rank);
    if (run.call.variant.epilogue == Epilogue::kNone) return;
    check_tensor(run.tensors[rank].residual_out, run.expected.residual_out, "residual_out", index,
                 rank);
  }

  // After the last call: every word of every ring is armed, and every call was counted once.
  void check_at_rest() const {
    for (int rank = 0; rank < kWorldSize; ++rank) {
      for (std::size_t slot = 0; slot < rings_[rank].size(); ++slot) {
        for (const uint32_t word : rings_[rank][slot].words) {
          if (word != kSentinel) fail("left over: %08x in slot %zu of rank %d", word, slot, rank);
        }
      }
      const uint32_t epoch = __atomic_load_n(&controls_[rank].epoch, __ATOMIC_RELAXED);
      if (epoch != num_calls() * 65536) fail("epoch of rank %d is %u / 65536", rank, epoch);
    }
  }

  // Whether every warp of the rank's call has published what it publishes before it waits.
  bool published(std::size_t index, int rank) const {
    return __atomic_load_n(&controls_[rank].epoch, __ATOMIC_RELAXED) / 65536 > index;
  }

  // The rank whose ring `to` points into; fails for any other address.
  int rank_of(const Pack* to) const {
    for (int rank = 0; rank < kWorldSize; ++rank) {
      if (to >= rings_[rank].data() && to < rings_[rank].data() + rings_[rank].size()) return rank;
    }
    fail("a store to an address that is in no ring");
  }

  std::size_t slot_of(const Pack* in_ring, int rank) const { return in_ring - rings_[rank].data(); }

  Pack* through_multicast(const Pack* to, int rank) {
    const std::size_t slot = to - multicast_.data();
    if (slot >= multicast_.size()) fail("a multicast store to another address");
    return &rings_[rank][slot];
  }

 private:
  static constexpr uint32_t kRingGenerations = 2;

  struct Tensors {
    Tensor input, output, residual_in, residual_out;
  };

  struct Run {
    Run(const Call& what, const Inputs& source) : call(what) {
      const uint32_t num_packs = call.num_packs();
      for (int rank = 0; rank < kWorldSize; ++rank) inputs[rank] = source.tensor(rank, num_packs);
      residual = source.tensor(kWorldSize, num_packs);
      gamma = source.tensor(kWorldSize + 1, call.hidden_packs);
      const Tensor unwritten(num_packs, uniform_pack(0xffffffffu));
      tensors.fill({unwritten, unwritten, unwritten, unwritten});
      expected = expect();
    }

    Expected expect() const {
      const auto of = [this](auto element) {
        return test::expected<decltype(element)>(call, inputs, residual, gamma, kEpsilon,
                                                 kWeightBias);
      };
      if (call.variant.dtype == DType::kFloat32) return of(Float32{});
      if (call.variant.dtype == DType::kFloat16) return of(Float16{});
      return of(BFloat16{});
    }

    Call call;
    std::array<Tensor, kWorldSize> inputs;
    Tensor residual, gamma;
    std::array<Tensors, kWorldSize> tensors;
    Expected expected;
  };

  void check_tensor(const Tensor& got, const Tensor& want, const char* name, std::size_t index,
                    int rank) const {
    for (std::size_t pack = 0; pack < want.size(); ++pack) {
      for (int word = 0; word < kWordsPerPack; ++word) {
        const uint32_t have = got[pack].words[word], due = want[pack].words[word];
        if (have == due) continue;
        fail("wrong value: %08x, not %08x, in word %d of pack %zu of %s, call %zu, rank %d", have,
             due, word, pack, name, index, rank);
      }
    }
  }

  uint32_t generation_packs_ = 0;
  std::vector<Run> runs_;
  std::array<Tensor, kWorldSize> rings_;
  Tensor multicast_;  // an address range that stands for all rings; nothing is ever stored there
  std::array<Control, kWorldSize> controls_ = {};
  std::array<TimeoutRecord, kWorldSize> records_ = {};
};

}  // namespace flashinfer_ar::test
