// What a call must give, from the definition: one scalar loop after the other.
//
// Conversions are those of types.cuh: their rounding has tests of its own, here the question is
// whose numbers were added.
#pragma once

#include <cmath>
#include <vector>

#include "calls.hpp"

namespace flashinfer_ar::test {

using Tensor = std::vector<Pack>;

struct Expected {
  Tensor output;
  Tensor residual_out;
};

// Only where subnormals are flushed can a sum that starts at +0.0 become -0.0; there, and nowhere
// else, it matters that every published -0.0 counts as +0.0.
template <typename T>
Pack sum_over_ranks(const std::array<Tensor, kWorldSize>& inputs, std::size_t pack) {
  float sum[T::kPerPack] = {};
  for (const Tensor& input : inputs) {
    float floats[T::kPerPack];
    T::widen(T::positive_zeros(input[pack]), floats);
    for (int i = 0; i < T::kPerPack; ++i) sum[i] += floats[i];
  }
  return T::narrow(sum);
}

template <typename T>
Pack add(const Pack& a, const Pack& b) {
  float x[T::kPerPack], y[T::kPerPack];
  T::widen(a, x);
  T::widen(b, y);
  for (int i = 0; i < T::kPerPack; ++i) x[i] += y[i];
  return T::narrow(x);
}

// The tree of reduce.cuh: elements of a pack and packs of a group by halving, groups in four
// chains, then these by halving.
template <typename T>
float sum_of_squares(const Pack* row, uint32_t hidden_packs) {
  std::array<float, 4> chains = {};
  for (uint32_t first = 0; first < hidden_packs; first += kWarpSize) {
    std::array<float, kWarpSize> sums = {};
    for (uint32_t lane = 0; lane < kWarpSize && first + lane < hidden_packs; ++lane) {
      float x[T::kPerPack];
      T::widen(row[first + lane], x);
      for (float& value : x) value *= value;
      for (int half = T::kPerPack / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) x[i] += x[i + half];
      }
      sums[lane] = x[0];
    }
    for (uint32_t half = kWarpSize / 2; half > 0; half /= 2) {
      for (uint32_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    }
    chains[first / kWarpSize % 4] += sums[0];
  }
  return (chains[0] + chains[2]) + (chains[1] + chains[3]);
}

template <typename T>
void normalise(const Pack* row, const Tensor& gamma, float epsilon, float weight_bias,
               Pack* output) {
  const uint32_t hidden_packs = gamma.size();
  const float hidden = static_cast<float>(hidden_packs * T::kPerPack);
  const float mean = sum_of_squares<T>(row, hidden_packs) / hidden;
  const float inv = 1.0f / std::sqrt(mean + epsilon);
  for (uint32_t pack = 0; pack < hidden_packs; ++pack) {
    float x[T::kPerPack], weight[T::kPerPack];
    T::widen(row[pack], x);
    T::widen(gamma[pack], weight);
    for (int i = 0; i < T::kPerPack; ++i) x[i] = x[i] * inv * (weight_bias + weight[i]);
    output[pack] = T::narrow(x);
  }
}

template <typename T>
Expected expected(const Call& call, const std::array<Tensor, kWorldSize>& inputs,
                  const Tensor& residual, const Tensor& gamma, float epsilon, float weight_bias) {
  Tensor sums(call.num_packs());
  for (std::size_t i = 0; i < sums.size(); ++i) {
    sums[i] = sum_over_ranks<T>(inputs, i);
    if (call.variant.kind == Kind::kTwoShot) sums[i] = T::positive_zeros(sums[i]);
  }
  if (call.variant.epilogue == Epilogue::kNone) return {sums, {}};
  Tensor output(sums.size());
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = add<T>(sums[i], residual[i]);
  for (std::size_t i = 0; i < sums.size(); i += call.hidden_packs) {
    normalise<T>(&sums[i], gamma, epsilon, weight_bias, &output[i]);
  }
  return {output, sums};
}

}  // namespace flashinfer_ar::test
