// The portable layer on the host, in C++20 for g++. Contract: platform.cuh.
//
// A grid's threads run as fibers of the calling OS thread (host_launch.hpp), or as anything else
// that has a Scheduler: tests run them as OS threads under ThreadSanitizer, or in random order with
// a Fabric that delays, reorders and tears the stores that cross between ranks.
//
// Compiler builtins stand for <atomic> and <cmath>, which take a third of a kernel's build.
#pragma once

#include <time.h>

#include <bit>
#include <cstddef>
#include <cstdint>

#define FAR_DEVICE inline
#define FAR_UNROLL
#define FAR_OFFSET_OF(Struct, member) __builtin_offsetof(Struct, member)

namespace flashinfer_ar {

using std::int32_t;
using std::uint32_t;
using std::uint64_t;

inline constexpr int kWarpSize = 32;

struct alignas(16) Pack {
  uint32_t words[4];
};

namespace host {

class Scheduler {
 public:
  virtual ~Scheduler() = default;
  virtual void yield() = 0;     // the calling thread waits for something; others may run
  virtual void progress() = 0;  // something that others wait for has happened
  virtual void wait_for_previous_grid() {}  // by default a rank's grids run one after the other
};

// Where stores to rings go. Without one they are performed at once.
class Fabric {
 public:
  virtual ~Fabric() = default;
  virtual void store(Pack* to, const Pack& pack) = 0;
  virtual void multicast_store(Pack* to, const Pack& pack) = 0;
};

inline Fabric* fabric = nullptr;

class Barrier {
 public:
  void wait(uint32_t count, Scheduler& scheduler) {
    const uint32_t phase = __atomic_load_n(&phase_, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&arrived_, 1, __ATOMIC_ACQ_REL) == count) {
      __atomic_store_n(&arrived_, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&phase_, phase + 1, __ATOMIC_RELEASE);
      scheduler.progress();
    } else {
      while (__atomic_load_n(&phase_, __ATOMIC_ACQUIRE) == phase) scheduler.yield();
    }
  }

 private:
  uint32_t arrived_ = 0, phase_ = 0;
};

struct Warp {
  Barrier barrier;
  Barrier cta_barrier;  // that of the CTA's first warp is used
  float exchanged[kWarpSize];
};

// What the threads of one launch share. Warps are indexed over the whole grid.
struct GridState {
  Scheduler* scheduler;
  uint32_t num_ctas;
  uint32_t threads_per_cta;
  std::ptrdiff_t shared_stride;  // bytes between the Shared structs of neighbouring CTAs
  Warp* warps;
};

}  // namespace host

class Thread {
 public:
  Thread(const host::GridState& grid, uint32_t thread_in_grid)
      : grid_(&grid),
        cta_(thread_in_grid / grid.threads_per_cta),
        thread_(thread_in_grid % grid.threads_per_cta) {}

  uint32_t cta() const { return cta_; }
  uint32_t num_ctas() const { return grid_->num_ctas; }
  uint32_t thread() const { return thread_; }
  uint32_t warp() const { return thread_ / kWarpSize; }
  uint32_t lane() const { return thread_ % kWarpSize; }

  void sync_warp() const { own_warp().barrier.wait(kWarpSize, *grid_->scheduler); }

  void gather_warps(int warps) const {
    host::Barrier& barrier = grid_->warps[cta_ * warps].cta_barrier;
    barrier.wait(warps * kWarpSize, *grid_->scheduler);
  }

  float shuffle_xor(float value, int mask) const {
    host::Warp& warp = own_warp();
    warp.exchanged[lane()] = value;
    sync_warp();
    const float other = warp.exchanged[lane() ^ mask];
    sync_warp();  // nobody overwrites a value that a slower lane has still to read
    return other;
  }

  void pause() const { grid_->scheduler->yield(); }
  void progress() const { grid_->scheduler->progress(); }

  uint64_t nanoseconds() const {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + now.tv_nsec;
  }

  void wait_for_previous_grid() const { grid_->scheduler->wait_for_previous_grid(); }
  void release_next_grid() const {}

  // The object that is to another CTA's Shared what `own` is to this CTA's.
  template <typename Object>
  Object* in_cta(uint32_t cta, Object* own) const {
    const auto distance = static_cast<std::ptrdiff_t>(cta) - static_cast<std::ptrdiff_t>(cta_);
    return reinterpret_cast<Object*>(reinterpret_cast<char*>(own) +
                                     distance * grid_->shared_stride);
  }

 private:
  host::Warp& own_warp() const {
    return grid_->warps[cta_ * (grid_->threads_per_cta / kWarpSize) + warp()];
  }

  const host::GridState* grid_;
  uint32_t cta_, thread_;
};

// ---- Memory ---------------------------------------------------------------------------------

FAR_DEVICE Pack load(const Pack* from) { return *from; }
FAR_DEVICE void store(Pack* to, const Pack& pack) { *to = pack; }

FAR_DEVICE uint32_t load_relaxed_device(const uint32_t* from) {
  return __atomic_load_n(from, __ATOMIC_RELAXED);
}

FAR_DEVICE void add_relaxed_device(uint32_t* to, uint32_t amount) {
  __atomic_fetch_add(to, amount, __ATOMIC_RELAXED);
}

FAR_DEVICE uint32_t exchange_relaxed_device(uint32_t* to, uint32_t value) {
  return __atomic_exchange_n(to, value, __ATOMIC_RELAXED);
}

FAR_DEVICE void store_release_system(uint32_t* to, uint32_t value) {
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
}

FAR_DEVICE Pack load_relaxed_system(const Pack* from) {
  Pack pack;
  for (int i = 0; i < 4; ++i) pack.words[i] = load_relaxed_device(&from->words[i]);
  return pack;
}

FAR_DEVICE void store_own_relaxed_system(Pack* to, const Pack& pack) {
  for (int i = 0; i < 4; ++i) __atomic_store_n(&to->words[i], pack.words[i], __ATOMIC_RELAXED);
}

FAR_DEVICE void store_relaxed_system(Pack* to, const Pack& pack) {
  if (host::fabric) return host::fabric->store(to, pack);
  store_own_relaxed_system(to, pack);
}

// Only a test's Fabric has multicast addresses on the host.
FAR_DEVICE void multimem_store_relaxed_system(Pack* to, const Pack& pack) {
  host::fabric->multicast_store(to, pack);
}

// ---- Arithmetic -----------------------------------------------------------------------------

FAR_DEVICE uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
FAR_DEVICE float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }
FAR_DEVICE float square_root(float value) { return __builtin_sqrtf(value); }

// A CPU hands on the payload of a NaN, a GPU does not.
FAR_DEVICE float storable(float value) { return value == value ? value : float_of(0x7fffffffu); }

FAR_DEVICE float float_of_f16(uint32_t bits) {
  return static_cast<float>(std::bit_cast<_Float16>(static_cast<std::uint16_t>(bits)));
}

FAR_DEVICE uint32_t f16_of(float value) {
  if (value != value) return 0x7fffu;
  return std::bit_cast<std::uint16_t>(static_cast<_Float16>(value));
}

FAR_DEVICE uint32_t bf16_of(float value) {
  if (value != value) return 0x7fffu;
  const uint32_t bits = bits_of(value);
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // round to nearest, ties to even
}

FAR_DEVICE void floats_of_f16x2(uint32_t word, float& low, float& high) {
  low = float_of_f16(word & 0xffffu);
  high = float_of_f16(word >> 16);
}

FAR_DEVICE uint32_t f16x2_of(float low, float high) { return f16_of(low) | f16_of(high) << 16; }
FAR_DEVICE uint32_t bf16x2_of(float low, float high) { return bf16_of(low) | bf16_of(high) << 16; }

// -0.0 is the one value that the sum changes; integers, so that no rounding mode has a say.
FAR_DEVICE uint32_t f16x2_plus_zero(uint32_t word) {
  if ((word & 0x0000ffffu) == 0x00008000u) word &= 0xffff0000u;
  if ((word & 0xffff0000u) == 0x80000000u) word &= 0x0000ffffu;
  return word;
}

FAR_DEVICE uint32_t bf16x2_plus_zero(uint32_t word) { return f16x2_plus_zero(word); }

// ---- Exchange inside a cluster --------------------------------------------------------------

// Same contract as on CUDA (the argument why two tables are enough is there): an entry is put into
// every CTA's copy, and each copy counts its arrivals over all rounds that used the table.
template <int Entries, int ClusterSize>
class ClusterExchange {
 public:
  FAR_DEVICE void prepare(Thread) {}
  FAR_DEVICE void open(Thread) {}

  FAR_DEVICE void put(Thread t, uint32_t round, uint32_t entry, float value) {
    if (t.lane() >= ClusterSize) return;
    const uint32_t first_cta = t.cta() / ClusterSize * ClusterSize;
    ClusterExchange* copy = t.in_cta(first_cta + t.lane(), this);
    copy->values_[round % 2][entry] = value;
    __atomic_fetch_add(&copy->arrivals_[round % 2], 1, __ATOMIC_RELEASE);
    t.progress();
  }

  FAR_DEVICE const float* collect(Thread t, uint32_t round) {
    const uint32_t complete = Entries * (round / 2 + 1);
    while (__atomic_load_n(&arrivals_[round % 2], __ATOMIC_ACQUIRE) < complete) t.pause();
    return values_[round % 2];
  }

 private:
  float values_[2][Entries];
  uint32_t arrivals_[2] = {};
};

}  // namespace flashinfer_ar

#include "flashinfer_ar/host_launch.hpp"
