// Two-shot allreduce in one kernel: scatter to owners, owners reduce, results to all, epilogue.
//
// Two hops, but only about 2 * size bytes in and out of a rank: for larger messages. The flattened
// tensor is cut into stripes of 32 packs, one warp's load, and rank r owns stripes r, r + W, r +
// 2W, ...: by stripe and not by token, so that even one token keeps every rank busy.
//
// Slots of a generation: first the scatter part, the stripes of the owner's share one after another
// and in each source by source; behind it the results, one slot a pack of the flattened tensor.
//
// An owner needs its own results in the ring only where another thread needs them, for a row's
// norm, or where a multicast store brings them anyway. Else it stores them into the output itself.
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
    // The next grid may be launched now; it waits for this one's end before it reads or stores.
    if (params.release_early) t.release_next_grid();
    reduce_owned(turn, stripes, params);
    epilogue.open();

    if constexpr (C.epilogue == Epilogue::kNone) {
      collect(turn, stripes, params.output);
    } else {
      for (uint32_t row = rows.first(); row < rows.count(); row += rows.step()) {
        if (row != rows.first()) epilogue.prefetch(row);
        const Results<C> batch{rows, turn.rank(), row, results(stripes)};
        Pack sums[C.packs_per_thread];
        turn.await(batch, sums);
        epilogue.take(row, sums);
        turn.template rearm<C.packs_per_thread>(batch);
        epilogue.finish(row);
      }
    }
  }

 private:
  FAR_DEVICE static uint32_t results(const Stripes<C>& stripes) {
    return stripes.owned() * C.world_size * kWarpSize;
  }

  static constexpr int kStripesAtOnce = 4;  // loads in flight together
  static constexpr bool kOwnInRing = C.epilogue != Epilogue::kNone || C.multicast;

  // Each W neighbouring stripes have W owners. Ranks walk them from different starts, so that at
  // any time every owner receives from one rank rather than one owner from all.
  FAR_DEVICE static void scatter(const Turn<C>& turn, const Stripes<C>& stripes,
                                 const Pack* input) {
    const uint32_t count = stripes.owned() * C.world_size;
    for (uint32_t first = stripes.first(); first < count;
         first += kStripesAtOnce * stripes.step()) {
      Pack packs[kStripesAtOnce];
      uint32_t share[kStripesAtOnce];
      int owner[kStripesAtOnce];
      bool sent[kStripesAtOnce];
      FAR_UNROLL
      for (int k = 0; k < kStripesAtOnce; ++k) {
        const uint32_t i = first + k * stripes.step();
        share[k] = i / C.world_size;
        owner[k] = static_cast<int>((i + turn.rank()) % C.world_size);
        const uint32_t stripe = share[k] * C.world_size + owner[k];
        sent[k] = i < count && owner[k] != turn.rank() && stripes.has(stripe);
        if (sent[k]) packs[k] = load(input + stripes.pack(stripe));
      }
      FAR_UNROLL
      for (int k = 0; k < kStripesAtOnce; ++k) {
        if (!sent[k]) continue;
        turn.publish_to(owner[k], stripes.slot(share[k], turn.rank()), T::positive_zeros(packs[k]));
      }
    }
  }

  static constexpr int kSharesAtOnce = kPacksPerBatch<C, kMaxSlotsPerBatch>;

  // Some of the warp's stripes of the own share, for sum_over_ranks.
  struct Shares {
    const Stripes<C>& stripes;
    int rank;
    uint32_t first;

    FAR_DEVICE uint32_t share(int k) const { return first + k * stripes.step(); }
    FAR_DEVICE uint32_t stripe(int k) const { return share(k) * C.world_size + rank; }
    FAR_DEVICE bool has(int k) const { return stripes.has(stripe(k)); }
    FAR_DEVICE uint32_t pack(int k) const { return stripes.pack(stripe(k)); }
    FAR_DEVICE uint32_t slot(int k) const { return stripes.slot(share(k), 0); }
    FAR_DEVICE uint32_t stride() const { return kWarpSize; }
  };

  // A sum that starts at +0.0 is never -0.0, but the rule that no payload holds one should not rest
  // on that argument.
  FAR_DEVICE static void reduce_owned(Turn<C>& turn, const Stripes<C>& stripes,
                                      const Params& params) {
    for (uint32_t first = stripes.first(); first < stripes.owned();
         first += kSharesAtOnce * stripes.step()) {
      const Shares shares{stripes, turn.rank(), first};
      Pack own[kSharesAtOnce], sums[kSharesAtOnce];
      FAR_UNROLL
      for (int k = 0; k < kSharesAtOnce; ++k) {
        if (shares.has(k)) own[k] = T::positive_zeros(load(params.input + shares.pack(k)));
      }
      sum_over_ranks<T, /*OwnInRing=*/false>(turn, shares, own, sums);
      FAR_UNROLL
      for (int k = 0; k < kSharesAtOnce; ++k) {
        if (!shares.has(k)) continue;
        const Pack sum = T::positive_zeros(sums[k]);
        turn.publish(results(stripes) + shares.pack(k), sum, /*include_own=*/kOwnInRing);
        if (!kOwnInRing) store(params.output + shares.pack(k), sum);
      }
      rearm_contributions<kSharesAtOnce, /*OwnInRing=*/false>(turn, shares);
    }
  }

  static constexpr int kOwnersInRing = kOwnInRing ? C.world_size : C.world_size - 1;

  // Some of the warp's stripes of results in the ring, as a batch for Turn::await.
  struct Collected {
    const Stripes<C>& stripes;
    int rank;
    uint32_t first;

    FAR_DEVICE uint32_t number(int k) const { return first + k * stripes.step(); }
    FAR_DEVICE int owner(int k) const {
      const int after_own = number(k) % kOwnersInRing + (C.world_size - kOwnersInRing);
      return (rank + after_own) % C.world_size;
    }
    FAR_DEVICE uint32_t stripe(int k) const {
      return number(k) / kOwnersInRing * C.world_size + owner(k);
    }
    FAR_DEVICE bool has(int k) const {
      return number(k) < stripes.owned() * kOwnersInRing && stripes.has(stripe(k));
    }
    FAR_DEVICE uint32_t pack(int k) const { return stripes.pack(stripe(k)); }
    FAR_DEVICE uint32_t slot(int k) const { return results(stripes) + pack(k); }
    FAR_DEVICE int source(int k) const { return owner(k) == rank ? kNobody : owner(k); }
  };

  // The output may be the input: a result comes after its owner has this rank's contribution, so
  // `scatter` has read what is overwritten, whichever warp did.
  FAR_DEVICE static void collect(Turn<C>& turn, const Stripes<C>& stripes, Pack* output) {
    if constexpr (kOwnersInRing > 0) {
      const uint32_t count = stripes.owned() * kOwnersInRing;
      for (uint32_t first = stripes.first(); first < count;
           first += C.packs_per_thread * stripes.step()) {
        const Collected batch{stripes, turn.rank(), first};
        Pack sums[C.packs_per_thread];
        turn.await(batch, sums);
        FAR_UNROLL
        for (int k = 0; k < C.packs_per_thread; ++k) {
          if (batch.has(k)) store(output + batch.pack(k), sums[k]);
        }
        turn.template rearm<C.packs_per_thread>(batch);
      }
    }
  }
};

}  // namespace flashinfer_ar
