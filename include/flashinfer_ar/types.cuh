// The element types, as views of a 16-byte Pack. Bit-equal on both platforms.
//
// A type has kPerPack elements in a pack and three functions:
//   widen(pack, floats)       to fp32, exact
//   narrow(floats)            to the type, rounded to nearest even; every NaN becomes the same NaN
//   positive_zeros(pack)      each element equal to -0.0 replaced by +0.0; a NaN stays some NaN
#pragma once

#include "flashinfer_ar/platform.cuh"

namespace flashinfer_ar {

inline constexpr int kWordsPerPack = 4;
inline constexpr int kPackBytes = 16;

struct Float32 {
  static constexpr int kPerPack = 4;

  FAR_DEVICE static void widen(const Pack& pack, float (&floats)[kPerPack]) {
    FAR_UNROLL
    for (int i = 0; i < kPerPack; ++i) floats[i] = float_of(pack.words[i]);
  }

  FAR_DEVICE static Pack narrow(const float (&floats)[kPerPack]) {
    Pack pack;
    FAR_UNROLL
    for (int i = 0; i < kPerPack; ++i) pack.words[i] = bits_of(storable(floats[i]));
    return pack;
  }

  FAR_DEVICE static Pack positive_zeros(Pack pack) {
    FAR_UNROLL
    for (int i = 0; i < kWordsPerPack; ++i) {
      if (pack.words[i] == 0x80000000u) pack.words[i] = 0;
    }
    return pack;
  }
};

struct Float16 {
  static constexpr int kPerPack = 8;

  FAR_DEVICE static void widen(const Pack& pack, float (&floats)[kPerPack]) {
    FAR_UNROLL
    for (int i = 0; i < kWordsPerPack; ++i) {
      floats_of_f16x2(pack.words[i], floats[2 * i], floats[2 * i + 1]);
    }
  }

  FAR_DEVICE static Pack narrow(const float (&floats)[kPerPack]) {
    Pack pack;
    FAR_UNROLL
    for (int i = 0; i < kWordsPerPack; ++i) {
      pack.words[i] = f16x2_of(floats[2 * i], floats[2 * i + 1]);
    }
    return pack;
  }

  FAR_DEVICE static Pack positive_zeros(Pack pack) {
    FAR_UNROLL
    for (int i = 0; i < kWordsPerPack; ++i) pack.words[i] = f16x2_plus_zero(pack.words[i]);
    return pack;
  }
};

struct BFloat16 {
  static constexpr int kPerPack = 8;

  FAR_DEVICE static void widen(const Pack& pack, float (&floats)[kPerPack]) {
    FAR_UNROLL
    for (int i = 0; i < kWordsPerPack; ++i) {
      floats[2 * i] = float_of(pack.words[i] << 16);
      floats[2 * i + 1] = float_of(pack.words[i] & 0xffff0000u);
    }
  }

  FAR_DEVICE static Pack narrow(const float (&floats)[kPerPack]) {
    Pack pack;
    FAR_UNROLL
    for (int i = 0; i < kWordsPerPack; ++i) {
      pack.words[i] = bf16x2_of(floats[2 * i], floats[2 * i + 1]);
    }
    return pack;
  }

  FAR_DEVICE static Pack positive_zeros(Pack pack) {
    FAR_UNROLL
    for (int i = 0; i < kWordsPerPack; ++i) pack.words[i] = bf16x2_plus_zero(pack.words[i]);
    return pack;
  }
};

}  // namespace flashinfer_ar
