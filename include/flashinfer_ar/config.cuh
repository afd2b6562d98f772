// What a kernel instance is compiled for, and the parameter block that a launch passes to it.
#pragma once

#include "flashinfer_ar/types.cuh"

namespace flashinfer_ar {

enum class Epilogue : int {
  kNone,        // output = the sum
  kAddRmsNorm,  // residual_out = sum + residual; output = RMSNorm(residual_out)
};

inline constexpr int kAnyRank = -1;   // the rank comes from the parameter block (host builds)
inline constexpr int kAnyHidden = 0;  // so does the hidden size (generic instances)

// One token, or for Epilogue::kNone one tile of the flattened tensor, is a *row*: the work of one
// cluster. Its packs lie in the cluster's threads as
//   pack = (cta_in_cluster * packs_per_thread + k) * threads + thread,  0 <= k < packs_per_thread
// so that 32 neighbouring packs, a *group*, always belong to one warp.
struct Config {
  int world_size;
  int rank;
  int hidden_packs;
  int warps;             // a CTA
  int cluster;           // CTAs a row
  int packs_per_thread;  // of a row
  int ctas_per_sm;       // that must fit at once, so what the compiler may spend on a thread
  bool multicast;
  Epilogue epilogue;

  FAR_DEVICE constexpr int threads() const { return warps * kWarpSize; }
  FAR_DEVICE constexpr int row_capacity() const {  // packs
    return cluster * packs_per_thread * threads();
  }
  FAR_DEVICE constexpr int groups() const { return row_capacity() / kWarpSize; }
};

// Written by the first thread whose wait outlives the deadline, in memory that the CPU can read.
// `state` is stored last, with release.
struct TimeoutRecord {
  uint32_t state;  // 0: nothing happened; 1: the other fields are valid
  int32_t rank;
  int32_t peer;   // whose data did not come
  uint32_t call;  // Params::call of the launch
  uint32_t pack;  // of the flattened tensor
  uint32_t epoch;
};

// Device words that only the rank's own grids touch.
struct Control {
  uint32_t epoch;    // calls completed * 65536 + CTAs of the running grid that read it already
  uint32_t expired;  // 1 once a wait has outlived the deadline: later waits give up at once
};

// Tensors are contiguous, [num_tokens, hidden] and gamma [hidden], 16-byte aligned, all of the
// kernel's element type. jit/params.py writes the same block; generated sources assert its layout.
template <int WorldSize>
struct Params {
  const Pack* input;
  Pack* output;
  const Pack* residual_in;
  Pack* residual_out;
  const Pack* gamma;
  Pack* rings[WorldSize];  // every rank's ring, the own one included
  Pack* multicast;         // all of them at once
  Control* control;
  TimeoutRecord* timeout_record;
  uint64_t timeout_ns;
  uint64_t generation_packs;  // half of a ring
  uint32_t num_tokens;
  uint32_t hidden_packs;
  int32_t rank;
  float epsilon;
  float weight_bias;
  uint32_t call;           // the launcher's number for this call's shape
  uint32_t release_early;  // whether the next grid may start before this one ends (plan.py)
};

}  // namespace flashinfer_ar
