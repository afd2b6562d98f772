// Which packs a thread holds: a row is one token, or one tile of the flattened tensor when the
// epilogue does not care about tokens (config.cuh has the layout of a row).
#pragma once

#include "flashinfer_ar/config.cuh"

namespace flashinfer_ar {

template <Config C>
class Rows {
 public:
  FAR_DEVICE Rows(Thread t, const Params<C.world_size>& params) : thread_(t), params_(params) {}

  FAR_DEVICE uint32_t hidden_packs() const {
    return C.hidden_packs == kAnyHidden ? params_.hidden_packs : C.hidden_packs;
  }
  FAR_DEVICE uint32_t num_packs() const { return params_.num_tokens * hidden_packs(); }

  // Packs of a row; the last tile of a tensor may have fewer.
  FAR_DEVICE uint32_t row_packs() const { return kTokens ? hidden_packs() : C.row_capacity(); }

  FAR_DEVICE uint32_t count() const {
    if constexpr (kTokens) return params_.num_tokens;
    return (num_packs() + row_packs() - 1) / row_packs();
  }

  // A cluster's rows are first(), first() + step(), ... < count(); a launch has no more clusters
  // than rows.
  FAR_DEVICE uint32_t first() const { return thread_.cta() / C.cluster; }
  FAR_DEVICE uint32_t step() const { return thread_.num_ctas() / C.cluster; }

  FAR_DEVICE uint32_t pack_in_row(int k) const {
    const uint32_t cta_in_cluster = thread_.cta() % C.cluster;
    return (cta_in_cluster * C.packs_per_thread + k) * C.threads() + thread_.thread();
  }
  FAR_DEVICE uint32_t group(int k) const { return pack_in_row(k) / kWarpSize; }

  // Whether the thread's k-th place holds a pack of a token.
  FAR_DEVICE bool in_token(int k) const { return pack_in_row(k) < hidden_packs(); }

  // Whether the thread's k-th place holds a pack of the row.
  FAR_DEVICE bool has(uint32_t row, int k) const {
    if constexpr (kTokens) return C.hidden_packs == C.row_capacity() || in_token(k);
    return pack(row, k) < num_packs();
  }

  // Index of that pack in the flattened tensor.
  FAR_DEVICE uint32_t pack(uint32_t row, int k) const { return row * row_packs() + pack_in_row(k); }

  FAR_DEVICE void load_row(const Pack* tensor, uint32_t row,
                           Pack (&packs)[C.packs_per_thread]) const {
    FAR_UNROLL
    for (int k = 0; k < C.packs_per_thread; ++k) {
      if (has(row, k)) packs[k] = load(tensor + pack(row, k));
    }
  }

 private:
  static constexpr bool kTokens = C.epilogue != Epilogue::kNone;

  Thread thread_;
  const Params<C.world_size>& params_;
};

}  // namespace flashinfer_ar
