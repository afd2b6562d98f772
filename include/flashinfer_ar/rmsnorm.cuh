// The epilogue of a transformer layer: residual add and RMSNorm of the sum, one row a cluster.
//
//   residual_out = round_T(sum + residual_in)
//   output       = round_T(x * inv * (weight_bias + gamma)), x = residual_out in fp32,
//                  inv = 1 / sqrt(sum(x^2) / hidden + epsilon)
// from left to right, everything in fp32 without contraction; reduce.cuh has the order of sum(x^2).
// weight_bias is 1 for Gemma, whose checkpoints store gamma - 1. Interface: epilogue.cuh.
#pragma once

#include "flashinfer_ar/reduce.cuh"
#include "flashinfer_ar/rows.cuh"

namespace flashinfer_ar {

template <typename T, Config C>
class AddRmsNorm {
  static constexpr int kPacks = C.packs_per_thread;
  using Exchange = ClusterExchange<C.groups(), C.cluster>;

 public:
  struct Shared {
    Exchange partial_sums;
  };

  // Gamma is a weight: no kernel writes it, so it is loaded before the wait for the previous grid.
  FAR_DEVICE AddRmsNorm(Thread t, Shared& shared, const Params<C.world_size>& params,
                        const Rows<C>& rows)
      : thread_(t), exchange_(shared.partial_sums), params_(params), rows_(rows) {
    exchange_.prepare(t);
    FAR_UNROLL
    for (int k = 0; k < kPacks; ++k) {
      if (rows_.in_token(k)) {
        gamma_[k] = load(params_.gamma + rows_.pack_in_row(k));
      }
    }
  }

  FAR_DEVICE void open() { exchange_.open(thread_); }

  FAR_DEVICE void prefetch(uint32_t row) { rows_.load_row(params_.residual_in, row, residual_); }

  // The partial sums leave first: the cluster waits for them, and for nothing else here.
  FAR_DEVICE void take(uint32_t row, const Pack (&sums)[kPacks]) {
    FAR_UNROLL
    for (int k = 0; k < kPacks; ++k) {
      float squares = 0.0f;
      if (rows_.has(row, k)) {
        x_[k] = add(sums[k], residual_[k]);
        squares = sum_of_squares(x_[k]);
      }
      exchange_.put(thread_, round_, rows_.group(k), warp_sum(thread_, squares));
    }
    FAR_UNROLL
    for (int k = 0; k < kPacks; ++k) {
      if (rows_.has(row, k)) store(params_.residual_out + rows_.pack(row, k), x_[k]);
    }
  }

  FAR_DEVICE void finish(uint32_t row) {
    const float inv = inverse_rms(exchange_.collect(thread_, round_));
    FAR_UNROLL
    for (int k = 0; k < kPacks; ++k) {
      if (rows_.has(row, k))
        store(params_.output + rows_.pack(row, k), normalise(x_[k], gamma_[k], inv));
    }
    ++round_;
  }

 private:
  FAR_DEVICE static Pack add(const Pack& sum, const Pack& residual) {
    float floats[T::kPerPack];
    T::widen(sum, floats);
    accumulate<T>(floats, residual);
    return T::narrow(floats);
  }

  FAR_DEVICE static float sum_of_squares(const Pack& pack) {
    float x[T::kPerPack];
    T::widen(pack, x);
    FAR_UNROLL
    for (int i = 0; i < T::kPerPack; ++i) x[i] *= x[i];
    return sum_by_halving(x);
  }

  FAR_DEVICE float inverse_rms(const float* partial_sums) const {
    const uint32_t groups = (rows_.hidden_packs() + kWarpSize - 1) / kWarpSize;
    const float sum = sum_of_groups(partial_sums, groups);
    const float hidden = static_cast<float>(rows_.hidden_packs() * T::kPerPack);
    return 1.0f / square_root(sum / hidden + params_.epsilon);
  }

  FAR_DEVICE Pack normalise(const Pack& pack, const Pack& gamma, float inv) const {
    float x[T::kPerPack], weight[T::kPerPack];
    T::widen(pack, x);
    T::widen(gamma, weight);
    FAR_UNROLL
    for (int i = 0; i < T::kPerPack; ++i) x[i] = x[i] * inv * (params_.weight_bias + weight[i]);
    return T::narrow(x);
  }

  Thread thread_;
  Exchange& exchange_;
  const Params<C.world_size>& params_;
  const Rows<C>& rows_;
  Pack gamma_[kPacks];
  Pack residual_[kPacks];
  Pack x_[kPacks];  // the row being normalised
  uint32_t round_ = 0;
};

}  // namespace flashinfer_ar
