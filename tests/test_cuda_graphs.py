"""CUDA graphs: many of them among eager calls, captures that fail, workspaces made under capture.

Ranks are virtual: threads that share the device (:mod:`cuda_tools`).
"""

from __future__ import annotations

import random

import pytest
import torch
from cuda_tools import DEVICE, Staged, capture_in_turn, in_turn, make_calls, needs_cuda, raw_capture
from harness import Strategy, assert_outputs_equal, check, random_call, stream_of_rank
from workspace_tools import is_armed, open_workspace

import flashinfer_ar as far

pytestmark = needs_cuda

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
SEED = 2026


@pytest.fixture(autouse=True)
def short_deadline(monkeypatch):
    monkeypatch.setenv("FLASHINFER_AR_TIMEOUT_S", "20")


# Many graphs

WORLD_SIZE = 4
NUM_ROUNDS = 30
ROUND = 8  # graphs and eager calls of a round, which start before any of them has ended
ONESHOT, TWOSHOT = ({"strategy": kind} for kind in (Strategy.ONESHOT, Strategy.TWOSHOT))
FUSED, PDL = {"fused": True}, {"launch_with_pdl": True}

# An even number of calls starts every replay in one generation of the ring, an odd one does not.
GRAPHS = (
    ((3, 256, bf16, ONESHOT | FUSED | PDL),),
    ((129, 64, bf16, TWOSHOT), (2, 256, bf16, TWOSHOT | FUSED | PDL)),
    ((1, 64, fp32, ONESHOT | PDL), (64, 64, fp16, TWOSHOT | FUSED), (1, 256, bf16, ONESHOT)),
    (
        (5, 256, bf16, TWOSHOT | FUSED | PDL),
        (1, 1024, bf16, ONESHOT | FUSED | PDL),
        (1, 1024, bf16, TWOSHOT | PDL),
        (67, 64, fp32, ONESHOT | FUSED),
        (2, 256, fp16, TWOSHOT | PDL),
    ),
)
EAGER = (
    ((5, 256, bf16, ONESHOT | FUSED),),
    ((7, 64, bf16, TWOSHOT | PDL),),
    ((33, 64, fp32, TWOSHOT | FUSED | PDL),),
)
PLAYS = (*GRAPHS, *EAGER)


def random_plays():
    """A list for each round: which of ``PLAYS``, with which calls; equal on all ranks."""
    chance, seeds = random.Random(SEED), iter(range(NUM_ROUNDS * ROUND))
    return [
        [
            (which, make_calls(WORLD_SIZE, PLAYS[which], next(seeds)))
            for which in chance.choices(range(len(PLAYS)), k=ROUND)
        ]
        for _ in range(NUM_ROUNDS)
    ]


class Play:
    """A graph with its static tensors, or an eager call; on one rank."""

    def __init__(self, static, graph, workspace):
        self._static, self._graph, self._workspace = static, graph, workspace

    def run(self, staged):
        """The calls with the inputs of ``staged``, which gets the outputs."""
        if self._graph is None:
            for call in staged:
                call.launch(self._workspace)
            return
        for own, new in zip(self._static, staged, strict=True):
            own.take(new)
        self._graph.replay()
        for own, new in zip(self._static, staged, strict=True):
            new.keep(own)


def launch_all(staged, workspace):
    for call in staged:
        call.launch(workspace)


def make_play(comm, device, workspace, which):
    """Graphs come in turn from the rank's own stream and from torch's capture stream."""
    calls = make_calls(WORLD_SIZE, PLAYS[which], 0)
    static = [Staged(call, comm.Get_rank(), device) for call in calls]
    if PLAYS[which] not in GRAPHS:
        return Play(static, None, workspace)
    own = torch.cuda.current_stream(device) if which % 2 and device.type == "cuda" else None
    graph = capture_in_turn(comm, device, lambda: launch_all(static, workspace), own)
    return Play(static, graph, workspace)


def warm_up(staged, device):
    """What torch loads at its first use."""
    for call in staged:
        call.keep(Staged(call.call, 0, device))
    torch.zeros(1, dtype=torch.int64, device=device).fill_(1)  # a replay may do this


def run_rounds(comm, device, rounds):
    rank = comm.Get_rank()
    size = {"buffer_size_in_bytes": 1 << 20, "hidden_dim": 256, "dtype": bf16}
    with stream_of_rank(device), open_workspace(comm, device, **size) as workspace:
        plays = [make_play(comm, device, workspace, which) for which in range(len(PLAYS))]
        staged = [
            [(which, [Staged(call, rank, device) for call in calls]) for which, calls in listed]
            for listed in rounds
        ]
        warm_up(staged[0][0][1], device)
        for listed in staged:
            workspace.synchronize()
            comm.barrier()
            for which, calls in listed:
                plays[which].run(calls)
        workspace.synchronize()
        comm.barrier()
        outputs = [[call.results() for _, calls in listed for call in calls] for listed in staged]
        assert is_armed(workspace)
        comm.barrier()
    return outputs


def check_rounds(device):
    rounds = random_plays()
    results = far.run_ranks(WORLD_SIZE, lambda comm: run_rounds(comm, device, rounds))
    for number, listed in enumerate(rounds):
        expected = [call.expected() for _, calls in listed for call in calls]
        for rank, outputs in enumerate(results):
            order = [which for which, _ in listed]
            label = f"rank {rank}, round {number}, {order} of PLAYS, seed {SEED}"
            assert_outputs_equal(outputs[number], expected, label)


def test_graphs_are_replayed_among_each_other_and_eager_calls():
    check_rounds(DEVICE)


# Captures that come to nothing


class GivenUpError(Exception):
    pass


def give_up_in_torch(staged, workspace):
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(GivenUpError),
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
        staged.launch(workspace)
        raise GivenUpError


def spoil(staged, workspace):
    """A stream that is being captured refuses to be waited for, and the capture is lost."""
    with raw_capture(torch.cuda.Stream(DEVICE)) as answers:
        staged.launch(workspace)
        with pytest.raises(RuntimeError, match="captur"):
            torch.cuda.current_stream(DEVICE).synchronize()
        with pytest.raises(far.FlashInferARError, match="STREAM_CAPTURE_INVALIDATED"):
            staged.launch(workspace)
    assert answers == ["CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"]


ABORTED_BY = {"an exception": give_up_in_torch, "a forbidden call": spoil}
AFTERWARDS = (
    (3, 256, bf16, ONESHOT | FUSED | PDL),
    (70, 64, bf16, TWOSHOT),
    (3, 256, bf16, TWOSHOT | FUSED),
)


@pytest.mark.parametrize("abort", ABORTED_BY.values(), ids=ABORTED_BY)
@pytest.mark.parametrize("aborting_ranks", [range(WORLD_SIZE), [1]], ids=["all ranks", "one rank"])
def test_an_aborted_capture_leaves_the_workspace_usable(abort, aborting_ranks):
    eager, captured = (make_calls(WORLD_SIZE, AFTERWARDS, seed) for seed in (1, 2))

    def rank_main(comm):
        rank = comm.Get_rank()
        with stream_of_rank(DEVICE), open_workspace(comm, DEVICE) as workspace:
            staged = [Staged(call, rank, DEVICE) for call in eager]
            static = [Staged(call, rank, DEVICE) for call in captured]
            warm_up(static, DEVICE)
            torch.cuda.synchronize(DEVICE)
            comm.barrier()
            staged[0].launch(workspace)
            workspace.synchronize()
            in_turn(comm, lambda: abort(static[0], workspace) if rank in aborting_ranks else None)
            launch_all(staged, workspace)
            workspace.synchronize()
            graph = capture_in_turn(comm, DEVICE, lambda: launch_all(static, workspace))
            graph.replay()
            launch_all(staged, workspace)
            workspace.synchronize()
            comm.barrier()
            return [call.results() for call in (*staged, *static)]

    expected = [call.expected() for call in (*eager, *captured)]
    for rank, outputs in enumerate(far.run_ranks(WORLD_SIZE, rank_main)):
        assert_outputs_equal(outputs, expected, f"rank {rank}")


# A workspace under capture


def test_a_workspace_under_capture_is_refused_and_the_capture_goes_on():
    """Only rank 0 captures; no rank is left waiting for it."""
    counter = torch.zeros(1, device=DEVICE)
    counter.add_(1)

    def refused(comm):
        with pytest.raises(far.FlashInferARError, match="captur"):
            open_workspace(comm, DEVICE)

    def rank_main(comm):
        if comm.Get_rank() > 0:
            return refused(comm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            counter.add_(1)
            refused(comm)
            counter.add_(1)
        graph.replay()
        torch.cuda.synchronize(DEVICE)
        return None

    far.run_ranks(2, rank_main, timeout_s=10.0)
    assert counter.item() == 3
    check(2, [random_call(2, 3, 64, bf16)], DEVICE)
