"""Programmatic dependent launch: calls that may start before the kernels ahead of them have ended.

Ranks are virtual: threads that share the device (:mod:`cuda_tools`).
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from cuda_tools import (
    DEVICE,
    DeviceFunction,
    Staged,
    capture_in_turn,
    needs_cuda,
)
from harness import Strategy, assert_outputs_equal, random_call, stream_of_rank
from workspace_tools import open_workspace

import flashinfer_ar as far
from benchmarks.edited_headers import edited_headers
from flashinfer_ar import reference

pytestmark = needs_cuda

bf16 = torch.bfloat16
SEED = 2026


@pytest.fixture(autouse=True)
def short_deadline(monkeypatch):
    monkeypatch.setenv("FLASHINFER_AR_TIMEOUT_S", "20")


# A chain: every call and every kernel of torch takes what the one before it wrote

NUM_STEPS = 120
CHAIN_RANKS = 4
SHAPE = (9, 256)


@dataclasses.dataclass(frozen=True)
class Step:
    """A call, or with ``strategy=None`` a kernel of torch."""

    fused: bool
    launch_with_pdl: bool
    strategy: Strategy | None


def random_chain():
    """Not two plain calls in a row: their sums would grow without end."""
    chance = random.Random(SEED)
    steps = []
    for _ in range(NUM_STEPS):
        strategy = chance.choice((Strategy.ONESHOT, Strategy.TWOSHOT, None))
        fused = chance.random() < 0.5 or bool(steps and steps[-1].strategy)
        steps.append(Step(fused, chance.random() < 0.5, strategy))
    return steps


class Chain:
    """One rank's tensors: each step reads ``rows[i]`` and writes ``rows[i + 1]``."""

    def __init__(self, rank, device):
        generator = torch.Generator().manual_seed(SEED)

        def normal(*shape):  # in fp32, so that no stale value is rounded away
            return torch.randn(*shape, generator=generator)

        inputs = [normal(*SHAPE) for _ in range(CHAIN_RANKS)]
        # What torch adds: another tensor on every rank, so that ranks differ again.
        addends = [normal(*SHAPE) for _ in range(CHAIN_RANKS)]
        self.residual, self.gamma = (
            tensor.to(device) for tensor in (normal(*SHAPE), normal(SHAPE[1]))
        )
        self.addend = addends[rank].to(device)
        self.rows = [torch.empty_like(self.addend) for _ in range(NUM_STEPS + 1)]
        self.rows[0].copy_(inputs[rank])
        self.add(self.addend, self.addend.clone())  # torch loads the kernel

    def add(self, row, out):
        torch.add(self.addend, row, alpha=0.25, out=out)  # exact but for one rounding


def run_chain(chain, steps, workspace):
    for step, row, out in zip(steps, chain.rows, chain.rows[1:], strict=False):
        if step.strategy is None:
            chain.add(row, out)
        elif step.fused:
            far.trtllm_mnnvl_fused_allreduce_add_rmsnorm(
                row,
                chain.residual,
                chain.gamma,
                workspace,
                1e-5,
                out,
                chain.residual,  # in place
                step.launch_with_pdl,
                step.strategy,
            )
        else:
            far.trtllm_mnnvl_allreduce(row, workspace, step.launch_with_pdl, out, step.strategy)


def expected_chain(steps):
    """The last rows and residuals of all ranks, by the reference."""
    chains = [Chain(rank, torch.device("cpu")) for rank in range(CHAIN_RANKS)]
    for i, step in enumerate(steps):
        rows = [chain.rows[i] for chain in chains]
        if step.strategy is None:
            for chain in chains:
                chain.add(chain.rows[i], chain.rows[i + 1])
            continue
        if step.fused:
            out, residual = reference.allreduce_add_rmsnorm(
                rows, chains[0].residual, chains[0].gamma, 1e-5
            )
        else:
            out, residual = reference.allreduce(rows), chains[0].residual
        for chain in chains:
            chain.rows[i + 1], chain.residual = out, residual
    return [(*chain.rows, chain.residual) for chain in chains]


def check_chain(device):
    steps = random_chain()

    def rank_main(comm):
        with stream_of_rank(device), open_workspace(comm, device) as workspace:
            chain = Chain(comm.Get_rank(), device)
            workspace.synchronize()
            comm.barrier()
            run_chain(chain, steps, workspace)
            workspace.synchronize()
            comm.barrier()
            return [(tensor.cpu(),) for tensor in (*chain.rows, chain.residual)]

    results, due = far.run_ranks(CHAIN_RANKS, rank_main), expected_chain(steps)
    for rank, (got, want) in enumerate(zip(results, due, strict=True)):
        assert_outputs_equal(got, [(tensor,) for tensor in want], f"rank {rank}, seed {SEED}")


def test_a_chain_of_calls_and_torch_kernels():
    check_chain(DEVICE)


# A producer that lets its dependents start at once and writes late

WORLD_SIZE = 2
LATE_NS = 20_000_000  # the launches of all ranks fit in
STEPS = 3
WRITE_LATE = """
extern "C" __global__ void write_late(unsigned long long nanoseconds, uint4* input,
                                      const uint4* new_input, uint4* residual,
                                      const uint4* new_residual, unsigned long long num_packs) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < num_packs;
       i += gridDim.x * blockDim.x) {
    input[i] = new_input[i];
    residual[i] = new_residual[i];
  }
}
"""


def stale_and_right(strategy):
    """Calls that differ in what is late, not in gamma: a weight may be read early."""
    pairs = []
    for i in range(STEPS):
        stale, right = (
            random_call(
                *(WORLD_SIZE, 5, 256, bf16),
                fused=True,
                seed=2 * i + k,
                strategy=strategy,
                launch_with_pdl=True,
            )
            for k in range(2)
        )
        pairs.append((dataclasses.replace(stale, gamma=right.gamma), right))
    return pairs


def run_late(comm, pairs, in_graph):
    """Outputs of calls on stale tensors that a producer overwrites under them."""
    rank = comm.Get_rank()
    with stream_of_rank(DEVICE), open_workspace(comm, DEVICE) as workspace:
        write_late = DeviceFunction("write_late", WRITE_LATE)
        staged = [tuple(Staged(call, rank, DEVICE) for call in pair) for pair in pairs]

        def launches():
            for seen, late in staged:
                tensors = (seen.tensors[0], late.tensors[0], seen.tensors[1], late.tensors[1])
                num_packs = seen.tensors[0].nbytes // 16
                write_late.launch(2, 128, LATE_NS, *tensors, num_packs)
                seen.launch(workspace)

        torch.zeros(1, dtype=torch.int64, device=DEVICE).fill_(1)  # a replay may do this
        torch.cuda.synchronize(DEVICE)
        graph = capture_in_turn(comm, DEVICE, launches) if in_graph else None
        comm.barrier()
        (graph.replay if in_graph else launches)()
        workspace.synchronize()
        comm.barrier()
        return [seen.results() for seen, _ in staged]


def require_right(pairs, in_graph):
    results = far.run_ranks(WORLD_SIZE, lambda comm: run_late(comm, pairs, in_graph))
    expected = [right.expected() for _, right in pairs]
    for rank, outputs in enumerate(results):
        assert_outputs_equal(outputs, expected, f"rank {rank}")


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("strategy", [Strategy.ONESHOT, Strategy.TWOSHOT], ids=lambda s: s.name)
def test_what_a_producer_writes_late_is_read_whole(strategy, in_graph):
    require_right(stale_and_right(strategy), in_graph)


def test_control_without_the_wait_the_same_call_reads_stale_data():
    """Shows that the test above can fail: kernels that do not wait for the grid before them."""
    pairs = stale_and_right(Strategy.ONESHOT)[:1]
    wait = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
    with (
        edited_headers("platform_cuda.cuh", wait, ""),
        pytest.raises(AssertionError, match="elements differ"),
    ):
        require_right(pairs, in_graph=False)
