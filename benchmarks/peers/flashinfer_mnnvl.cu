// FlashInfer's MNNVL allreduce in bf16, through its own dispatch functions.
#include "shim.cuh"

#include <flashinfer/comm/trtllm_mnnvl_allreduce.cuh>

namespace mnnvl = flashinfer::trtllm_mnnvl_allreduce;

// One rank's memory. Mirrored by _Memory in flashinfer_mnnvl.py.
struct Memory {
  void** buffers;
  void* local;
  void* multicast;
  uint32_t* flags;
};

extern "C" char const* peer_call(Call const* call, Memory const* memory, Room* room) {
  mnnvl::AllReduceFusionParams params{};
  params.nRanks = call->world_size;
  params.rank = call->rank;
  params.numTokens = call->num_tokens;
  params.tokenDim = call->hidden;
  params.bufferPtrsDev = memory->buffers;
  params.bufferPtrLocal = memory->local;
  params.multicastPtr = memory->multicast;
  params.bufferFlags = memory->flags;
  params.rmsNormFusion = call->fused;
  params.launchWithPdl = true;
  params.input = call->input;
  params.residualIn = call->residual_in;
  params.gamma = call->gamma;
  params.epsilon = call->epsilon;
  params.residualOut = call->residual_out;
  params.output = call->output;
  params.stream = call->stream;
  return make_call(room, [&] {
    return call->two_shot ? mnnvl::twoshotAllreduceFusionDispatch<__nv_bfloat16>(params)
                          : mnnvl::oneshotAllreduceFusionDispatch<__nv_bfloat16>(params);
  });
}
