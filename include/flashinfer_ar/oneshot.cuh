// One-shot allreduce: every rank sends its whole input to every rank, and each reduces for itself.
//
// One hop, so the lowest latency; (world_size - 1) * size bytes come in, so for small messages.
// Slots of a generation: source-major, source * num_packs + pack of the flattened tensor.
#pragma once

#include "flashinfer_ar/epilogue.cuh"

namespace flashinfer_ar {

template <typename T, Config C>
struct OneShot {
  static constexpr int kThreads = C.threads();

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
    epilogue.open();

    for (uint32_t row = rows.first(); row < rows.count(); row += rows.step()) {
      if (row != rows.first()) {
        rows.load_row(params.input, row, own);
        positive_zeros(own);
        epilogue.prefetch(row);
      }
      Pack sums[C.packs_per_thread];
      FAR_UNROLL
      for (int k = 0; k < C.packs_per_thread; ++k) {
        if (!rows.has(row, k)) continue;
        const uint32_t pack = rows.pack(row, k);
        sums[k] = sum_over_ranks<T, C.multicast>(turn, own[k], pack, rows.num_packs(), pack);
      }
      epilogue.finish(row, sums);
    }
    t.release_next_grid();
  }

 private:
  FAR_DEVICE static void positive_zeros(Pack (&packs)[C.packs_per_thread]) {
    FAR_UNROLL
    for (int k = 0; k < C.packs_per_thread; ++k) packs[k] = T::positive_zeros(packs[k]);
  }

  FAR_DEVICE static void publish(const Turn<C>& turn, const Rows<C>& rows, uint32_t row,
                                 Pack (&packs)[C.packs_per_thread]) {
    positive_zeros(packs);
    FAR_UNROLL
    for (int k = 0; k < C.packs_per_thread; ++k) {
      if (!rows.has(row, k)) continue;
      turn.publish(turn.rank() * rows.num_packs() + rows.pack(row, k), packs[k]);
    }
  }
};

}  // namespace flashinfer_ar
