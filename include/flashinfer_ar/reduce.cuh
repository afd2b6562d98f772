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

// How many slots are polled as one batch: more would not fit the registers.
inline constexpr int kMaxSlotsPerBatch = 8;

template <Config C>
inline constexpr int kRanksPerBatch =
    C.world_size < kMaxSlotsPerBatch ? C.world_size : kMaxSlotsPerBatch;

// How many packs are summed together: with few ranks several.
template <Config C, int Packs>
inline constexpr int kPacksPerBatch =
    Packs * kRanksPerBatch<C> <= kMaxSlotsPerBatch ? Packs : kMaxSlotsPerBatch / kRanksPerBatch<C>;

// The contributions of some ranks to some packs, as a batch for Turn::await: those of the ranks
// from `first_rank` on to the thread's packs from `first_pack` on. `Place` tells where those packs
// are: has(k), pack(k) in the tensor, slot(k) of rank 0's contribution, and stride(), the distance
// to the next rank's. The own contribution is there only if it was published to the own ring too,
// as a multicast store does.
template <Config C, bool OwnInRing, typename Place>
struct Contributions {
  const Turn<C>& turn;
  const Place& place;
  int first_pack;
  int first_rank;

  FAR_DEVICE int source(int i) const { return first_rank + i % kRanksPerBatch<C>; }
  FAR_DEVICE int k(int i) const { return first_pack + i / kRanksPerBatch<C>; }
  FAR_DEVICE bool in_ring(int i) const { return OwnInRing || source(i) != turn.rank(); }
  FAR_DEVICE bool has(int i) const {
    return source(i) < C.world_size && in_ring(i) && (k(i) == first_pack || place.has(k(i)));
  }
  FAR_DEVICE uint32_t slot(int i) const { return source(i) * place.stride() + place.slot(k(i)); }
  FAR_DEVICE uint32_t pack(int i) const { return place.pack(k(i)); }
};

// Awaits every rank's contributions to the thread's packs and sums them over ranks. `own` is what
// this rank published. The sum of zeros is +0.0.
template <typename T, bool OwnInRing, Config C, typename Place, int Packs>
FAR_DEVICE void sum_over_ranks(Turn<C>& turn, const Place& place, const Pack (&own)[Packs],
                               Pack (&sums)[Packs]) {
  constexpr int kRanks = kRanksPerBatch<C>, kPacks = kPacksPerBatch<C, Packs>;
  FAR_UNROLL
  for (int first_pack = 0; first_pack < Packs; first_pack += kPacks) {
    if (!place.has(first_pack)) continue;  // nor the ones behind it
    float sum[kPacks][T::kPerPack] = {};
    FAR_UNROLL
    for (int first_rank = 0; first_rank < C.world_size; first_rank += kRanks) {
      const Contributions<C, OwnInRing, Place> batch{turn, place, first_pack, first_rank};
      Pack values[kPacks * kRanks];
      turn.await(batch, values);
      FAR_UNROLL
      for (int i = 0; i < kPacks * kRanks; ++i) {
        if (batch.source(i) >= C.world_size) continue;
        accumulate<T>(sum[i / kRanks], batch.in_ring(i) ? values[i] : own[batch.k(i)]);
      }
      if constexpr (kRanks < C.world_size) turn.template rearm<kPacks * kRanks>(batch);
    }
    FAR_UNROLL
    for (int i = 0; i < kPacks; ++i) sums[first_pack + i] = T::narrow(sum[i]);
  }
}

// Arms the slots that `sum_over_ranks` read, later than there, when nobody waits. Of several
// batches of ranks each was armed at once: keeping all their addresses would cost more registers
// than there are.
template <int Packs, bool OwnInRing, Config C, typename Place>
FAR_DEVICE void rearm_contributions(const Turn<C>& turn, const Place& place) {
  if (C.world_size > kMaxSlotsPerBatch || !place.has(0)) return;
  turn.template rearm<Packs * C.world_size>(Contributions<C, OwnInRing, Place>{turn, place, 0, 0});
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
