// Two-shot allreduce in one kernel: scatter to owners, owners reduce, results to all, epilogue.
//
// Two hops, but only about 2 * size bytes in and out of a rank: for larger messages. The flattened
// tensor is cut into stripes of 32 packs, one warp's load, and rank r owns stripes r, r + W, r +
// 2W, ...: by stripe and not by token, so that even one token keeps every rank busy.
//
// Slots of a generation: first the scatter part, the stripes of the owner's share one after another
// and in each source by source; behind it the results, one slot a pack of the flattened tensor.
#pragma once

#include "flashinfer_ar/epilogue.cuh"

namespace flashinfer_ar {

// The stripes of one warp: warp w of n in the grid takes stripes w, w + n, ... of those it is asked
// for.
template <Config C>
class Stripes {
 public:
  FAR_DEVICE Stripes(Thread t, uint32_t num_packs)
      : lane_(t.lane()),
        first_warp_(t.cta() * C.warps + t.warp()),
        num_warps_(t.num_ctas() * C.warps),
        num_packs_(num_packs) {}

  FAR_DEVICE uint32_t first() const { return first_warp_; }
  FAR_DEVICE uint32_t step() const { return num_warps_; }
  FAR_DEVICE uint32_t count() const { return (num_packs_ + kWarpSize - 1) / kWarpSize; }
  // Stripes that each rank owns, rounded up so that all shares have the same size.
  FAR_DEVICE uint32_t owned() const { return (count() + C.world_size - 1) / C.world_size; }

  FAR_DEVICE uint32_t pack(uint32_t stripe) const { return stripe * kWarpSize + lane_; }
  // The slot of a source's contribution to the share's stripe.
  FAR_DEVICE uint32_t slot(uint32_t share, int source) const {
    return (share * C.world_size + source) * kWarpSize + lane_;
  }
  FAR_DEVICE bool has(uint32_t stripe) const { return pack(stripe) < num_packs_; }

 private:
  uint32_t lane_, first_warp_, num_warps_, num_packs_;
};

// The results of the thread's packs of one row, as a batch for Turn::await.
template <Config C>
struct Results {
  const Rows<C>& rows;
  int rank;
  uint32_t row;
  uint32_t first_slot;

  FAR_DEVICE bool has(int k) const { return rows.has(row, k); }
  FAR_DEVICE uint32_t slot(int k) const { return first_slot + rows.pack(row, k); }
  // An own result is late because another thread of this rank waits for a contribution; that thread
  // knows whose.
  FAR_DEVICE int source(int k) const {
    const int owner = rows.pack(row, k) / kWarpSize % C.world_size;
    return owner == rank ? kNobody : owner;
  }
  FAR_DEVICE uint32_t pack(int k) const { return rows.pack(row, k); }
};

template <typename T, Config C>
struct TwoShot {
  static constexpr int kThreads = C.threads();
  static constexpr int kCtasPerSm = C.ctas_per_sm;

  using Params = flashinfer_ar::Params<C.world_size>;
  using RowEpilogue = typename EpilogueFor<T, C>::type;

  struct Shared {
    typename RowEpilogue::Shared epilogue;
  };

  FAR_DEVICE static void run(Thread t, Shared& shared, const Params& params) {
    const Rows<C> rows(t, params);
    RowEpilogue epilogue(t, shared.epilogue, params, rows);
    t.wait_for_previous_grid();
    Turn<C> turn(t, params);
    const Stripes<C> stripes(t, rows.num_packs());

    epilogue.prefetch(rows.first());
    scatter(turn, stripes, params.input);
    turn.advance();
    reduce_owned(turn, stripes, params.input);
    epilogue.open();

    for (uint32_t row = rows.first(); row < rows.count(); row += rows.step()) {
      if (row != rows.first()) epilogue.prefetch(row);
      const Results<C> batch{rows, turn.rank(), row, results(stripes)};
      Pack sums[C.packs_per_thread];
      turn.await(batch, sums);
      epilogue.take(row, sums);
      turn.template rearm<C.packs_per_thread>(batch);
      epilogue.finish(row);
    }
    t.release_next_grid();
  }

 private:
  FAR_DEVICE static uint32_t results(const Stripes<C>& stripes) {
    return stripes.owned() * C.world_size * kWarpSize;
  }

  // Each W neighbouring stripes have W owners. Ranks walk them from different starts, so that at
  // any time every owner receives from one rank rather than one owner from all.
  FAR_DEVICE static void scatter(const Turn<C>& turn, const Stripes<C>& stripes,
                                 const Pack* input) {
    for (uint32_t i = stripes.first(); i < stripes.owned() * C.world_size; i += stripes.step()) {
      const uint32_t share = i / C.world_size;
      const int owner = static_cast<int>((i + turn.rank()) % C.world_size);
      const uint32_t stripe = share * C.world_size + owner;
      if (owner == turn.rank() || !stripes.has(stripe)) continue;
      turn.publish_to(owner, stripes.slot(share, turn.rank()),
                      T::positive_zeros(load(input + stripes.pack(stripe))));
    }
  }

  // A sum that starts at +0.0 is never -0.0, but the rule that no payload holds one should not rest
  // on that argument.
  FAR_DEVICE static void reduce_owned(Turn<C>& turn, const Stripes<C>& stripes, const Pack* input) {
    for (uint32_t share = stripes.first(); share < stripes.owned(); share += stripes.step()) {
      const uint32_t stripe = share * C.world_size + turn.rank();
      if (!stripes.has(stripe)) continue;
      const uint32_t pack = stripes.pack(stripe), slot = stripes.slot(share, 0);
      const Pack own = T::positive_zeros(load(input + pack));
      const Pack sum = sum_over_ranks<T, /*OwnInRing=*/false>(turn, own, slot, kWarpSize, pack);
      if (turn.expired()) return;  // and publish no NaN: peers must meet their own deadline
      turn.publish(results(stripes) + pack, T::positive_zeros(sum), /*include_own=*/true);
      rearm_contributions</*OwnInRing=*/false>(turn, slot, kWarpSize);
    }
  }
};

}  // namespace flashinfer_ar
