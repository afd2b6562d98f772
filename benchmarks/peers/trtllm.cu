// TensorRT-LLM's fused allreduce as FlashInfer ships it, in bf16, through its own launchers.
#include "shim.cuh"
// The peer's header lacks one of its includes.
#include <array>

#include <flashinfer/comm/trtllm_allreduce_fusion.cuh>

namespace trtllm = flashinfer::trtllm_allreduce_fusion;
using Params = trtllm::AllReduceFusionParams<__nv_bfloat16>;
using Pattern = trtllm::AllReduceFusionPattern;

// One rank's memory, and how it sums. Mirrored by _Memory in trtllm.py.
struct Memory {
  void** workspace;
  int fp32_acc;
};

// The peer's own dispatch would compile every quantization pattern.
template <Pattern kPattern, int kWorldSize>
cudaError_t launch(Params const& params, bool fp32_acc) {
  if (fp32_acc) {
    return trtllm::allreduce_fusion_kernel_launcher<kPattern, __nv_bfloat16, kWorldSize, true>(
        params, true);
  }
  return trtllm::allreduce_fusion_kernel_launcher<kPattern, __nv_bfloat16, kWorldSize, false>(
      params, true);
}

template <Pattern kPattern>
cudaError_t launch(Params const& params, bool fp32_acc) {
  switch (params.nranks) {
    case 2:
      return launch<kPattern, 2>(params, fp32_acc);
    case 4:
      return launch<kPattern, 4>(params, fp32_acc);
    case 8:
      return launch<kPattern, 8>(params, fp32_acc);
  }
  return cudaErrorInvalidValue;
}

extern "C" char const* peer_call(Call const* call, Memory const* memory, Room* room) {
  Params params{};
  params.nranks = call->world_size;
  params.rank = call->rank;
  params.size = call->num_tokens * call->hidden;
  params.hidden_dim = call->hidden;
  params.workspace = memory->workspace;
  params.allreduce_in = call->input;
  params.rms_eps = call->epsilon;
  params.use_oneshot = !call->two_shot;
  params.stream = call->stream;
  params.trigger_completion_at_end = true;
  if (!call->fused) {
    params.pattern = Pattern::kAllReduce;
    params.allreduce_out = call->output;
    return make_call(room, [&] { return launch<Pattern::kAllReduce>(params, memory->fp32_acc); });
  }
  params.pattern = Pattern::kARResidualRMSNorm;
  params.residual_in = call->residual_in;
  params.residual_out = call->residual_out;
  params.norm_out = call->output;
  params.rms_gamma = call->gamma;
  return make_call(room,
                   [&] { return launch<Pattern::kARResidualRMSNorm>(params, memory->fp32_acc); });
}
