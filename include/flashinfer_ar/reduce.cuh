// Sums with one fixed order each, so that a result depends on nothing but the numbers.
//
// Over ranks: fp32, from +0.0, ranks 0 .. W-1, one rounding at the end. Over a row (squares): the
// elements of a pack by halving, the 32 packs of a group by an xor butterfly, the groups in four
// chains, of group numbers equal modulo 4, that are then halved. A group is 32 neighbouring packs
// of the row, whichever warp holds it, so the tree is the same for every grid, CTA and cluster
// shape. Halving adds element i + n/2 to element i: short chains, which is what latency asks for.
#pragma once

#include "flashinfer_ar/lamport.cuh"

namespace flashinfer_ar {

template <typename T>
FAR_DEVICE void accumulate(float (&sum)[T::kPerPack], const Pack& pack) {
  float floats[T::kPerPack];
  T::widen(pack, floats);
  FAR_UNROLL
  for (int i = 0; i < T::kPerPack; ++i) sum[i] += floats[i];
}

// How many ranks are polled as one batch: more would not fit the registers.
inline constexpr int kMaxRanksPerBatch = 8;

// The contributions of ranks first, first + 1, ... to one pack, as a batch for Turn::await.
// Contribution `source` lies in slot source * stride + slot_in_stride; the own one only if it was
// published to the own ring too, as a multicast store does.
template <Config C, bool OwnInRing>
struct Contributions {
  const Turn<C>& turn;
  int first;
  uint32_t slot_in_stride;
  uint32_t stride;
  uint32_t pack_in_tensor;

  FAR_DEVICE bool has(int i) const {
    return first + i < C.world_size && (OwnInRing || first + i != turn.rank());
  }
  FAR_DEVICE uint32_t slot(int i) const { return (first + i) * stride + slot_in_stride; }
  FAR_DEVICE int source(int i) const { return first + i; }
  FAR_DEVICE uint32_t pack(int) const { return pack_in_tensor; }
};

// Awaits every rank's contribution to one pack and returns the sum over ranks. `own` is this rank's
// contribution as published. The sum of zeros is +0.0.
template <typename T, bool OwnInRing, Config C>
FAR_DEVICE Pack sum_over_ranks(Turn<C>& turn, const Pack& own, uint32_t slot, uint32_t stride,
                               uint32_t pack) {
  constexpr int kBatch = C.world_size < kMaxRanksPerBatch ? C.world_size : kMaxRanksPerBatch;
  float sum[T::kPerPack] = {};
  FAR_UNROLL
  for (int first = 0; first < C.world_size; first += kBatch) {
    const Contributions<C, OwnInRing> batch{turn, first, slot, stride, pack};
    Pack values[kBatch];
    turn.await(batch, values);
    FAR_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < C.world_size) accumulate<T>(sum, batch.has(i) ? values[i] : own);
    }
    if constexpr (kBatch < C.world_size) turn.template rearm<kBatch>(batch);
  }
  return T::narrow(sum);
}

// Arms the slots that `sum_over_ranks` read, later than there, when nobody waits. Of several
// batches each was armed at once: keeping all their addresses would cost more registers than there
// are.
template <bool OwnInRing, Config C>
FAR_DEVICE void rearm_contributions(const Turn<C>& turn, uint32_t slot, uint32_t stride) {
  if constexpr (C.world_size > kMaxRanksPerBatch) return;
  turn.template rearm<C.world_size>(Contributions<C, OwnInRing>{turn, 0, slot, stride, 0});
}

// The sum of `Count` (a power of two) values by halving.
template <int Count>
FAR_DEVICE float sum_by_halving(float (&values)[Count]) {
  FAR_UNROLL
  for (int half = Count / 2; half > 0; half /= 2) {
    FAR_UNROLL
    for (int i = 0; i < half; ++i) values[i] += values[i + half];
  }
  return values[0];
}

inline constexpr int kChains = 4;

// The sum of `groups` partial sums, none of them negative (so that a missing one may count as 0).
FAR_DEVICE float sum_of_groups(const float* partial_sums, uint32_t groups) {
  float chains[kChains] = {};
  FAR_UNROLL
  for (uint32_t first = 0; first < groups; first += kChains) {
    FAR_UNROLL
    for (uint32_t i = 0; i < kChains; ++i) {
      if (first + i < groups) chains[i] += partial_sums[first + i];
    }
  }
  return sum_by_halving(chains);
}

// The sum over a warp, on every lane: x + y = y + x, so all lanes of a butterfly get the same bits.
FAR_DEVICE float warp_sum(Thread t, float value) {
  FAR_UNROLL
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) value += t.shuffle_xor(value, mask);
  return value;
}

}  // namespace flashinfer_ar
