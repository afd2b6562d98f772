"""Runs the same calls on every rank of a substrate and compares each with the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import flashinfer_ar as far
from flashinfer_ar import reference
from flashinfer_ar.bootstrap import CommBackend

Strategy = far.MNNVLAllreduceFusionStrategy
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Call:
    """One call of the API: the tensors of all ranks, on the CPU, and how to run it."""

    inputs: Sequence[torch.Tensor]
    residual: torch.Tensor | None = None  # None: plain allreduce
    gamma: torch.Tensor | None = None
    strategy: Strategy = Strategy.AUTO
    launch_with_pdl: bool = False
    epsilon: float = 1e-5
    weight_bias: float = 0.0
    before: Callable[[int], None] = field(default=lambda rank: None)  # runs ahead of the call

    def expected(self) -> tuple[torch.Tensor, ...]:
        if self.residual is None:
            return (reference.allreduce(self.inputs),)
        return reference.allreduce_add_rmsnorm(
            self.inputs, self.residual, self.gamma, self.epsilon, self.weight_bias
        )


def random_call(
    world_size: int,
    num_tokens: int,
    hidden: int,
    dtype: torch.dtype,
    *,
    fused: bool = False,
    seed: int = 0,
    **how: Any,
) -> Call:
    """Normal inputs that differ by seed, rank and token, so that stale data shows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    inputs = [normal(num_tokens, hidden) for _ in range(world_size)]
    if not fused:
        return Call(inputs, **how)
    return Call(inputs, normal(num_tokens, hidden), normal(hidden), **how)


def run_on_rank(
    comm: CommBackend,
    calls: Sequence[Call],
    device: torch.device,
    **workspace_arguments: Any,
) -> list[tuple[torch.Tensor, ...]]:
    """One rank's part: make a workspace, run all calls in a row, return the outputs on the CPU."""
    rank, world_size = comm.Get_rank(), comm.Get_size()
    workspace = far.MNNVLAllReduceFusionWorkspace(
        far.Mapping(world_size, rank, tp_size=world_size),
        comm_backend=comm,
        device=device,
        **{"buffer_size_in_bytes": buffer_bytes(world_size, calls), **workspace_arguments},
    )
    with stream_of_rank(device):
        # Everything that torch may have to load or allocate comes first: on a GPU it could wait
        # behind a peer's kernel that waits for this rank.
        staged = [_stage(call, rank, device) for call in calls]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        comm.barrier()
        for call, (arguments, _) in zip(calls, staged, strict=True):
            call.before(rank)
            _run(call, arguments, workspace)
        workspace.synchronize()
        outputs = [tuple(tensor.cpu() for tensor in outputs) for _, outputs in staged]
    comm.barrier()
    workspace.close()
    return outputs


def check(
    world_size: int, calls: Sequence[Call], device: torch.device, **workspace_arguments: Any
) -> None:
    """Run the calls with in-process ranks; all outputs must have the reference's bits."""
    results = far.run_ranks(
        world_size, lambda comm: run_on_rank(comm, calls, device, **workspace_arguments)
    )
    expected = [call.expected() for call in calls]
    for rank, outputs in enumerate(results):
        assert_outputs_equal(outputs, expected, f"rank {rank}")


def assert_outputs_equal(
    outputs: Sequence[tuple[torch.Tensor, ...]],
    expected: Sequence[tuple[torch.Tensor, ...]],
    label: str,
) -> None:
    for index, (got, want) in enumerate(zip(outputs, expected, strict=True)):
        for name, have, due in zip(("output", "residual_out"), got, want, strict=False):
            wrong = (reference.bits(have) != reference.bits(due)).nonzero()
            if len(wrong):
                where = tuple(wrong[0].tolist())
                raise AssertionError(
                    f"{label}, call {index}, {name}: {len(wrong)} of {have.numel()} elements "
                    f"differ, first at {where}: {have[where]} for {due[where]}"
                )


def buffer_bytes(world_size: int, calls: Sequence[Call]) -> int:
    """A generation large enough for every call with every strategy."""
    largest = max((call.inputs[0].nbytes for call in calls), default=0)
    return (world_size + 1) * max(largest, 16) + world_size * 1024


@contextlib.contextmanager
def stream_of_rank(device: torch.device) -> Iterator[None]:
    """On a GPU, a stream of the rank's own: kernels of one stream cannot wait for each other."""
    if device.type == "cpu":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def _stage(
    call: Call, rank: int, device: torch.device
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    arguments = [
        tensor.to(device, copy=True)
        for tensor in (call.inputs[rank], call.residual, call.gamma)
        if tensor is not None
    ]
    num_outputs = 1 if call.residual is None else 2
    outputs = tuple(torch.full_like(arguments[0], float("nan")) for _ in range(num_outputs))
    return [*arguments, *outputs], outputs


def _run(call: Call, tensors: list[torch.Tensor], workspace: Any) -> None:
    if call.residual is None:
        input, output = tensors
        far.trtllm_mnnvl_allreduce(
            input, workspace, call.launch_with_pdl, output, strategy=call.strategy
        )
    else:
        input, residual, gamma, output, residual_out = tensors
        far.trtllm_mnnvl_fused_allreduce_add_rmsnorm(
            input,
            residual,
            gamma,
            workspace,
            call.epsilon,
            output,
            residual_out,
            call.launch_with_pdl,
            call.strategy,
            call.weight_bias,
        )
