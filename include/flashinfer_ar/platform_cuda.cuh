// The portable layer on CUDA: the only file with PTX or CUDA builtins. Contract: platform.cuh.
#pragma once

#define FAR_DEVICE __device__ __forceinline__
#define FAR_UNROLL _Pragma("unroll")

// NVRTC before 13.5 has no __builtin_offsetof and no header that has offsetof; its front end has
// this.
#define FAR_OFFSET_OF(Struct, member) __INTADDR__(&static_cast<Struct*>(nullptr)->member)

// The second launch bound caps registers such that a grid's CTAs fit (config.cuh). Dynamic shared
// memory, so that device code stays free of hidden `__shared__` variables and the
// launcher states the size. `__grid_constant__` keeps the peer pointers in the constant bank.
#define FAR_KERNEL(name, Kernel)                                                              \
  extern "C" __global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)          \
      name(const __grid_constant__ Kernel::Params params) {                                   \
    extern __shared__ __align__(16) unsigned char shared[];                                   \
    Kernel::run(flashinfer_ar::Thread{}, *reinterpret_cast<Kernel::Shared*>(shared), params); \
  }

namespace flashinfer_ar {

// NVRTC is given no standard headers.
using uint32_t = unsigned int;
using int32_t = int;
using uint64_t = unsigned long long;

inline constexpr int kWarpSize = 32;

struct alignas(16) Pack {
  uint32_t words[4];
};

struct Thread {
  FAR_DEVICE uint32_t cta() const { return blockIdx.x; }
  FAR_DEVICE uint32_t num_ctas() const { return gridDim.x; }
  FAR_DEVICE uint32_t thread() const { return threadIdx.x; }
  FAR_DEVICE uint32_t warp() const { return threadIdx.x / kWarpSize; }
  FAR_DEVICE uint32_t lane() const { return threadIdx.x % kWarpSize; }
  FAR_DEVICE void sync_warp() const { __syncwarp(); }
  // Not `.aligned`: a warp counts as arrived once all its lanes are. Barrier 0 is __syncthreads'.
  FAR_DEVICE void gather_warps(int warps) const {
    if (warp() == 0) {
      asm volatile("barrier.cta.sync 1, %0;" ::"r"(warps * kWarpSize) : "memory");
    } else {
      asm volatile("barrier.cta.arrive 1, %0;" ::"r"(warps * kWarpSize) : "memory");
    }
  }
  FAR_DEVICE float shuffle_xor(float value, int mask) const {
    return __shfl_xor_sync(0xffffffffu, value, mask);
  }
  FAR_DEVICE void pause() const {}
  FAR_DEVICE uint64_t nanoseconds() const {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }
  // The "memory" clobbers keep the compiler from moving accesses across the wait and the release.
  FAR_DEVICE void wait_for_previous_grid() const {
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }
  FAR_DEVICE void release_next_grid() const {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
};

// ---- Memory ---------------------------------------------------------------------------------

FAR_DEVICE Pack load(const Pack* from) {
  const uint4 value = *reinterpret_cast<const uint4*>(from);
  return {value.x, value.y, value.z, value.w};
}

FAR_DEVICE void store(Pack* to, const Pack& pack) {
  *reinterpret_cast<uint4*>(to) =
      make_uint4(pack.words[0], pack.words[1], pack.words[2], pack.words[3]);
}

FAR_DEVICE Pack load_relaxed_system(const Pack* from) {
  Pack pack;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.words[0]), "=r"(pack.words[1]), "=r"(pack.words[2]), "=r"(pack.words[3])
               : "l"(from)
               : "memory");
  return pack;
}

FAR_DEVICE void store_relaxed_system(Pack* to, const Pack& pack) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(pack.words[0]),
               "r"(pack.words[1]), "r"(pack.words[2]), "r"(pack.words[3])
               : "memory");
}

FAR_DEVICE void store_own_relaxed_system(Pack* to, const Pack& pack) {
  store_relaxed_system(to, pack);
}

// PTX leaves an ordinary store to a multicast address undefined; only multimem operations may touch
// one. The type is a formality: the sixteen bytes arrive as they are.
FAR_DEVICE void multimem_store_relaxed_system(Pack* to, const Pack& pack) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to),
               "f"(__uint_as_float(pack.words[0])), "f"(__uint_as_float(pack.words[1])),
               "f"(__uint_as_float(pack.words[2])), "f"(__uint_as_float(pack.words[3]))
               : "memory");
}

FAR_DEVICE uint32_t load_relaxed_device(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// `red`, not `atom`: no value comes back, so nothing waits for it.
FAR_DEVICE void add_relaxed_device(uint32_t* to, uint32_t amount) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(amount) : "memory");
}

FAR_DEVICE uint32_t exchange_relaxed_device(uint32_t* to, uint32_t value) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(to), "r"(value)
               : "memory");
  return before;
}

FAR_DEVICE void store_release_system(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// ---- Arithmetic -----------------------------------------------------------------------------

FAR_DEVICE uint32_t bits_of(float value) { return __float_as_uint(value); }
FAR_DEVICE float float_of(uint32_t bits) { return __uint_as_float(bits); }
FAR_DEVICE float storable(float value) { return value; }  // FADD and FMUL give the one NaN already
FAR_DEVICE float square_root(float value) { return __fsqrt_rn(value); }

// The sum of each half with +0.0, which turns -0.0 into +0.0 in one instruction.
FAR_DEVICE uint32_t f16x2_plus_zero(uint32_t word) {
  asm("add.rn.f16x2 %0, %0, %1;" : "+r"(word) : "r"(0));
  return word;
}

FAR_DEVICE uint32_t bf16x2_plus_zero(uint32_t word) {
  asm("add.rn.bf16x2 %0, %0, %1;" : "+r"(word) : "r"(0));
  return word;
}

FAR_DEVICE void floats_of_f16x2(uint32_t word, float& low, float& high) {
  asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;\n}"
      : "=f"(low), "=f"(high)
      : "r"(word));
}

FAR_DEVICE uint32_t f16x2_of(float low, float high) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

FAR_DEVICE uint32_t bf16x2_of(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// ---- Exchange inside a cluster --------------------------------------------------------------

// A table of `Entries` floats, one copy in every CTA of a cluster. In round r = 0, 1, 2, ... each
// entry is put once, by one warp of one CTA, into all copies; `collect` returns this CTA's copy
// when all entries are there.
//
// Two tables take turns. A warp puts into round r + 2 only after it collected round r + 1, for
// which every warp of the cluster had put, and each did so after it finished reading round r: so
// the table of round r is free again, without another barrier.
//
// In a cluster, entries travel by st.async, which counts its bytes on the receiver's mbarrier: the
// receiver waits for exactly its own entries, and no cluster barrier stands on the critical path. A
// CTA cannot exit while a peer still writes into it, since its last `collect` waited for all of
// them.
template <int Entries, int ClusterSize>
class ClusterExchange {
 public:
  // Called by all threads as early as possible; the arrival is awaited only in `open`. Not
  // `.aligned`: a warp's lanes may come out of their waits at different times.
  FAR_DEVICE void prepare(Thread t) {
    if constexpr (ClusterSize > 1) {
      if (t.thread() == 0) {
        FAR_UNROLL
        for (int table = 0; table < 2; ++table) {
          asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&arrivals_[table]))
                       : "memory");
          expect(table);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      }
      asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    }
  }

  // Called by all threads once, before the first `put`: every CTA's mbarriers exist now.
  FAR_DEVICE void open(Thread) const {
    if constexpr (ClusterSize > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  }

  // Called by all lanes of one warp with the same value.
  FAR_DEVICE void put(Thread t, uint32_t round, uint32_t entry, float value) {
    float* to = &values_[round % 2][entry];
    if constexpr (ClusterSize == 1) {
      if (t.lane() == 0) *to = value;
    } else if (t.lane() < ClusterSize) {
      const uint32_t remote = remote_address(address(to), t.lane());
      const uint32_t barrier = remote_address(address(&arrivals_[round % 2]), t.lane());
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(remote),
          "f"(value), "r"(barrier)
          : "memory");
    }
  }

  // Called by all threads; returns the complete table.
  FAR_DEVICE const float* collect(Thread t, uint32_t round) {
    if constexpr (ClusterSize == 1) {
      __syncthreads();
    } else {
      const uint32_t barrier = address(&arrivals_[round % 2]);
      const uint32_t parity = (round / 2) % 2;
      uint32_t done = 0;
      while (!done) {
        asm volatile(
            "{\n .reg .pred p;\n"
            " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            " selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
      }
      if (t.thread() == 0) expect(round % 2);  // the phase of round + 2
    }
    return values_[round % 2];
  }

 private:
  FAR_DEVICE static uint32_t address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  }

  FAR_DEVICE static uint32_t remote_address(uint32_t own, uint32_t cta_in_cluster) {
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(cta_in_cluster));
    return remote;
  }

  FAR_DEVICE void expect(int table) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&arrivals_[table])),
        "n"(Entries * 4)
        : "memory");
  }

  alignas(16) float values_[2][Entries];
  alignas(8) uint64_t arrivals_[2];  // mbarriers
};

}  // namespace flashinfer_ar
