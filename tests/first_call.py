"""Case 11, a fresh process without warm-up: the first call ever is fused, on all ranks at once."""

from __future__ import annotations

import sys

import torch
from harness import Call, assert_outputs_equal, random_call, stream_of_rank

import flashinfer_ar as far

WORLD_SIZE = 4


def rank_main(comm: far.InProcessBackend, call: Call, device: torch.device) -> None:
    rank = comm.Get_rank()
    workspace = far.MNNVLAllReduceFusionWorkspace(
        far.Mapping(WORLD_SIZE, rank, tp_size=WORLD_SIZE),
        max_num_tokens=4,
        hidden_dim=256,
        dtype=torch.bfloat16,
        comm_backend=comm,
        device=device,
    )
    with stream_of_rank(device):
        arguments = [tensor.to(device) for tensor in (call.inputs[rank], call.residual, call.gamma)]
        comm.barrier()  # inputs are there; outputs are allocated by the call
        outputs = far.trtllm_mnnvl_fused_allreduce_add_rmsnorm(*arguments, workspace, call.epsilon)
        workspace.synchronize()
        got = tuple(tensor.cpu() for tensor in outputs)
    comm.barrier()
    workspace.close()
    assert_outputs_equal([got], [call.expected()], f"rank {rank}")


def main() -> None:
    device = torch.device(sys.argv[1])
    call = random_call(WORLD_SIZE, 3, 256, torch.bfloat16, fused=True)
    far.run_ranks(WORLD_SIZE, lambda comm: rank_main(comm, call, device))
    print("first call ok")


if __name__ == "__main__":
    main()
