// The portable layer: everything that the kernels take from the machine, under one set of names.
//
// One kernel source is compiled twice, by NVRTC for a GPU and by g++ for the host, so that the host
// build is an exact oracle for the device build. The kernels use only the names below; each of the
// two platform files defines all of them, and no other header knows which one it got.
//
// Where a thread stands and how it meets its neighbours:
//   Thread                        a thread's place in its grid; passed by value to everything
//     cta(), num_ctas()           index of the thread's CTA in the grid, CTAs in the grid
//     thread(), warp(), lane()    index in the CTA; warp in the CTA; lane in the warp
//     sync_warp()                 every lane arrives; earlier accesses of each are seen by all
//     gather_warps(n)             warp 0 waits until all n warps of its CTA have called it, and is
//                                 ordered after their earlier accesses; the others need not wait
//     shuffle_xor(value, mask)    the value of lane ^ mask; every lane takes part
//     pause()                     one turn of a waiting loop: lets somebody else run
//     nanoseconds()               a monotonic clock
//     wait_for_previous_grid()    returns when the grid before this one has ended, stores included
//     release_next_grid()         allows the grid after this one to be launched early (PDL)
//   ClusterExchange<Entries, ClusterSize>   a table of floats that all CTAs of a cluster fill
//
// Memory. "relaxed" accesses are single-copy atomic for each 4-byte word and order nothing:
//   load(p), store(p, pack)                a call's own tensors; 16 bytes, ordinary accesses
//   load_relaxed_system(p)                 a slot of the rank's own ring, which peers write
//   store_relaxed_system(p, pack)          a slot of any rank's ring
//   store_own_relaxed_system(p, pack)      a slot of the rank's own ring (re-arm)
//   multimem_store_relaxed_system(p, pack)  p is a multicast address: that slot of every ring
//   load_relaxed_device(p)                 32-bit words that only this rank's grids touch
//   add_relaxed_device(p, n)
//   exchange_relaxed_device(p, n)
//   store_release_system(p, n)             a 32-bit word that the CPU polls
//
// Arithmetic, IEEE round-to-nearest with subnormals, NaN always 0x7FFFFFFF when it is stored:
//   bits_of(float), float_of(bits), storable(float), square_root(float)
//   floats_of_f16x2(word, low, high), f16x2_of(low, high), bf16x2_of(low, high)
//   f16x2_plus_zero(word), bf16x2_plus_zero(word): each half + 0.0, in its own type
//
// FAR_DEVICE marks a function, FAR_UNROLL a loop that must be unrolled on the device;
// FAR_KERNEL(name, Kernel) makes the entry point that the launcher looks up by name, and
// FAR_OFFSET_OF(Struct, member) is offsetof.
#pragma once

#if defined(__CUDACC__)
#include "flashinfer_ar/platform_cuda.cuh"
#else
#include "flashinfer_ar/platform_host.hpp"
#endif
