// Every variant for every rank, with both compile-time constants, behind one interface.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

#include "calls.hpp"

namespace flashinfer_ar::test {

template <DType D>
using ElementOf = std::conditional_t<D == DType::kFloat32, Float32,
                                     std::conditional_t<D == DType::kFloat16, Float16, BFloat16>>;

template <Variant V, int Rank>
struct KernelFor {
  using Element = ElementOf<V.dtype>;
  static constexpr Config kConfig = V.config(Rank);
  using type = std::conditional_t<V.kind == Kind::kOneShot, OneShot<Element, kConfig>,
                                  TwoShot<Element, kConfig>>;
};

// One rank's grid of one call.
class Launch {
 public:
  virtual ~Launch() = default;
  virtual uint32_t num_threads() const = 0;
  virtual void run_thread(uint32_t thread_in_grid) = 0;
};

template <typename Kernel>
class LaunchOf : public Launch {
 public:
  LaunchOf(const Params<kWorldSize>& params, uint32_t num_ctas, host::Scheduler& scheduler)
      : params_(params), grid_(params_, num_ctas, scheduler) {}
  uint32_t num_threads() const override { return grid_.num_threads(); }
  void run_thread(uint32_t thread_in_grid) override { grid_.run_thread(thread_in_grid); }

 private:
  const Params<kWorldSize> params_;
  host::Grid<Kernel> grid_;
};

template <typename Kernel>
std::unique_ptr<Launch> make_launch(const Params<kWorldSize>& params, uint32_t num_ctas,
                                    host::Scheduler& scheduler) {
  return std::make_unique<LaunchOf<Kernel>>(params, num_ctas, scheduler);
}

template <const auto& Variants>
class Kernels {
  using Make = decltype(&make_launch<typename KernelFor<Variants[0], 0>::type>);
  using MakeOfRanks = std::array<Make, kWorldSize>;
  static constexpr std::size_t kCount = std::size(Variants);

 public:
  static std::unique_ptr<Launch> launch(const Call& call, int rank,
                                        const Params<kWorldSize>& params,
                                        host::Scheduler& scheduler) {
    static constexpr auto kTable = of_variants(std::make_index_sequence<kCount>());
    const uint32_t num_ctas = call.num_clusters[rank] * call.variant.cluster;
    return kTable[call.variant_index][rank](params, num_ctas, scheduler);
  }

 private:
  template <std::size_t V, std::size_t... Ranks>
  static constexpr MakeOfRanks of_ranks(std::index_sequence<Ranks...>) {
    return {&make_launch<typename KernelFor<Variants[V], int{Ranks}>::type>...};
  }

  template <std::size_t... Vs>
  static constexpr std::array<MakeOfRanks, kCount> of_variants(std::index_sequence<Vs...>) {
    return {of_ranks<Vs>(std::make_index_sequence<kWorldSize>())...};
  }
};

}  // namespace flashinfer_ar::test
