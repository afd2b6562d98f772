// Random numbers that are the same everywhere, and the one way in which a test program fails.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace flashinfer_ar::test {

// SplitMix64 (Steele, Lea, Flood 2014): its output function alone is a good hash.
inline std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

template <typename... Keys>
std::uint64_t hash_of(Keys... keys) {
  std::uint64_t hash = 0;
  ((hash = mix(hash + 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(keys))), ...);
  return hash;
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() { return mix(state_ += 0x9e3779b97f4a7c15u); }
  std::uint32_t below(std::uint32_t limit) { return (next() >> 32) * limit >> 32; }
  bool one_in(std::uint32_t count) { return below(count) == 0; }

 private:
  std::uint64_t state_;
};

inline std::uint64_t current_seed = 0;

// Ends the program at once: other fibers or threads are in the middle of something.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  std::fprintf(stderr, "seed %llu: ", static_cast<unsigned long long>(current_seed));
  std::va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::fflush(stderr);
  std::_Exit(1);
}

}  // namespace flashinfer_ar::test
