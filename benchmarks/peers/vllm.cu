// vLLM's custom allreduce as FlashInfer ships it, in bf16. Its own dispatch chooses the number of
// stages, so its kernels are launched here, on the grid that it would give them.
#include "shim.cuh"
// The peer's header lacks two of its includes.
#include <algorithm>
#include <stdexcept>

#include <flashinfer/comm/vllm_custom_all_reduce.cuh>

// One rank's memory: every rank's input on the device, and every rank's flags. Mirrored by _Memory
// in vllm.py.
struct Memory {
  vllm::RankData* inputs;
  vllm::Signal* signals[8];
  int num_ctas;
};

constexpr int kThreads = 512;

template <int kWorldSize>
cudaError_t launch(Call const& call, Memory const& memory) {
  using Packed = vllm::packed_t<nv_bfloat16>::P;
  int const packs = call.num_tokens * call.hidden / Packed::size;
  vllm::RankSignals signals{};
  std::copy(memory.signals, memory.signals + kWorldSize, signals.signals);
  cudaLaunchConfig_t config{};
  config.gridDim = std::min(memory.num_ctas, (packs + kThreads - 1) / kThreads);
  config.blockDim = kThreads;
  config.stream = call.stream;
  auto const kernel = call.two_shot ? vllm::cross_device_reduce_2stage<nv_bfloat16, kWorldSize>
                                    : vllm::cross_device_reduce_1stage<nv_bfloat16, kWorldSize>;
  return launch_or_measure(&config, kernel, memory.inputs, signals, signals.signals[call.rank],
                           static_cast<nv_bfloat16*>(call.output), call.rank, packs);
}

extern "C" char const* peer_call(Call const* call, Memory const* memory, Room* room) {
  return make_call(room, [&] {
    switch (call->world_size) {
      case 2:
        return launch<2>(*call, *memory);
      case 4:
        return launch<4>(*call, *memory);
      case 8:
        return launch<8>(*call, *memory);
    }
    return cudaErrorInvalidValue;
  });
}

// A rank's flags lie before its scratch.
extern "C" int64_t signal_bytes() { return sizeof(vllm::Signal); }

extern "C" int max_ctas() { return vllm::kMaxBlocks; }
