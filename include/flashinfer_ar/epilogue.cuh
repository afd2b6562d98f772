// What happens to a row of sums: every kernel ends in one of these.
//
// An epilogue is made at the start of the kernel, before the wait for the previous grid, and may
// load weights there; `open()` comes after the first publish. Then, for each row: `prefetch(row)`
// as early as the caller can, `take(row, sums)` once the sums are there, and `finish(row)`. Between
// the last two the cluster's partial sums are on their way: a place for work that nobody waits for.
// `sums[k]` are the thread's packs of the row, already rounded to T.
#pragma once

#include "flashinfer_ar/rmsnorm.cuh"

namespace flashinfer_ar {

// output = sum
template <typename T, Config C>
class StoreSum {
 public:
  struct Shared {};

  FAR_DEVICE StoreSum(Thread, Shared&, const Params<C.world_size>& params, const Rows<C>& rows)
      : params_(params), rows_(rows) {}

  FAR_DEVICE void open() {}
  FAR_DEVICE void prefetch(uint32_t) {}

  FAR_DEVICE void take(uint32_t row, const Pack (&sums)[C.packs_per_thread]) {
    FAR_UNROLL
    for (int k = 0; k < C.packs_per_thread; ++k) {
      if (rows_.has(row, k)) store(params_.output + rows_.pack(row, k), sums[k]);
    }
  }

  FAR_DEVICE void finish(uint32_t) {}

 private:
  const Params<C.world_size>& params_;
  const Rows<C>& rows_;
};

template <typename T, Config C>
struct EpilogueFor {
  using type = StoreSum<T, C>;
};

template <typename T, Config C>
  requires(C.epilogue == Epilogue::kAddRmsNorm)
struct EpilogueFor<T, C> {
  using type = AddRmsNorm<T, C>;
};

}  // namespace flashinfer_ar
