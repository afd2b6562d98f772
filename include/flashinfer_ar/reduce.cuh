// Sums with one fixed order each, so that a result depends on nothing but the numbers.
//
// Over ranks: fp32, from +0.0, ranks 0 .. W-1, one rounding at the end. Over a row (squares): the
// elements of a pack in order, the 32 packs of a group by an xor butterfly, the groups in order. A
// group is 32 neighbouring packs of the row, whichever warp holds it, so the tree is the same for
// every grid, CTA and cluster shape.
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

// Awaits every rank's contribution to one pack, re-arms their slots, and returns the sum over
// ranks. `own` is this rank's contribution as published. The sum of zeros is +0.0.
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
    if (!turn.expired()) turn.template rearm<kBatch>(batch);
  }
  return T::narrow(sum);
}

// The sum over a warp, on every lane: x + y = y + x, so all lanes of a butterfly get the same bits.
FAR_DEVICE float warp_sum(Thread t, float value) {
  FAR_UNROLL
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) value += t.shuffle_xor(value, mask);
  return value;
}

}  // namespace flashinfer_ar
