// One-shot allreduce: every rank sends its whole input to every rank, and each reduces for itself.
//
// One hop, so the lowest latency; (world_size - 1) * size bytes come in, so for small messages.
// Slots of a generation: source by source; but where the hidden size is a compile-time constant,
// token by token and in a token source by source, so that one address and constant offsets reach
// all contributions to a pack.
#pragma once

#include "flashinfer_ar/epilogue.cuh"

namespace flashinfer_ar {

template <typename T, Config C>
struct OneShot {
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

    Pack own[C.packs_per_thread];
    rows.load_row(params.input, rows.first(), own);
    epilogue.prefetch(rows.first());
    // Everything is published before anything is awaited: a peer's wait never depends on ours.
    publish(turn, rows, rows.first(), own);
    for (uint32_t row = rows.first() + rows.step(); row < rows.count(); row += rows.step()) {
      Pack packs[C.packs_per_thread];
      rows.load_row(params.input, row, packs);
      publish(turn, rows, row, packs);
    }
    turn.advance();
    // The next grid may be launched now; it waits for this one's end before it reads or stores.
    if (params.release_early) t.release_next_grid();
    epilogue.open();

    for (uint32_t row = rows.first(); row < rows.count(); row += rows.step()) {
      if (row != rows.first()) {
        rows.load_row(params.input, row, own);
        positive_zeros(own);
        epilogue.prefetch(row);
      }
      const Place place{rows, row};
      Pack sums[C.packs_per_thread];
      sum_over_ranks<T, C.multicast>(turn, place, own, sums);
      epilogue.take(row, sums);
      rearm_contributions<C.packs_per_thread, C.multicast>(turn, place);
      epilogue.finish(row);
    }
  }

 private:
  // The thread's packs of one row, for sum_over_ranks.
  struct Place {
    const Rows<C>& rows;
    uint32_t row;

    FAR_DEVICE bool has(int k) const { return rows.has(row, k); }
    FAR_DEVICE uint32_t pack(int k) const { return rows.pack(row, k); }
    FAR_DEVICE uint32_t slot(int k) const {
      if constexpr (!kByToken) return rows.pack(row, k);
      return row * C.world_size * stride() + rows.pack_in_row(k);
    }
    FAR_DEVICE uint32_t stride() const { return kByToken ? rows.row_packs() : rows.num_packs(); }
  };
  static constexpr bool kByToken = C.hidden_packs != kAnyHidden;

  FAR_DEVICE static void positive_zeros(Pack (&packs)[C.packs_per_thread]) {
    FAR_UNROLL
    for (int k = 0; k < C.packs_per_thread; ++k) packs[k] = T::positive_zeros(packs[k]);
  }

  FAR_DEVICE static void publish(const Turn<C>& turn, const Rows<C>& rows, uint32_t row,
                                 Pack (&packs)[C.packs_per_thread]) {
    positive_zeros(packs);
    const Place place{rows, row};
    FAR_UNROLL
    for (int k = 0; k < C.packs_per_thread; ++k) {
      if (place.has(k)) turn.publish(turn.rank() * place.stride() + place.slot(k), packs[k]);
    }
  }
};

}  // namespace flashinfer_ar
