"""Times calls of a workspace: from CUDA graphs on a GPU, by the clock on the host.

A GPU's virtual ranks are threads of one process, whose kernels wait for each other. So whatever may
load, allocate or wait for the device happens between two meetings of all ranks, while no kernel
runs, and ranks capture one after the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from flashinfer_ar.allreduce import (
    trtllm_mnnvl_allreduce,
    trtllm_mnnvl_fused_allreduce_add_rmsnorm,
)
from flashinfer_ar.bootstrap import CommBackend
from flashinfer_ar.calls import CallShape
from flashinfer_ar.jit import DType, Epilogue
from flashinfer_ar.mapping import Mapping
from flashinfer_ar.strategy import MNNVLAllreduceFusionStrategy as Strategy
from flashinfer_ar.workspace import MNNVLAllReduceFusionWorkspace

NUM_LEADING = 10  # calls that bring the ranks, whose launches are apart, into step
NUM_MEASURED = 40
NUM_LEADING_HOST = 1
NUM_MEASURED_HOST = 4
NUM_UNMEASURED_ROUNDS = 3


class Timer(Protocol):
    """Calls of one shape, ready to be run and timed."""

    def measure(self) -> float:
        """Microseconds a call, of the slowest rank; collective, equal on all ranks."""
        ...


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Both kernels on one shape: microseconds a call in each round, which timed both in turn."""

    shape: CallShape  # its strategy is left open (``AUTO``)
    one_shot_us: Sequence[float]
    two_shot_us: Sequence[float]


def timer_of(
    comm: CommBackend, workspace: MNNVLAllReduceFusionWorkspace, shape: CallShape
) -> Timer:
    """The way to time calls where the workspace lives; collective, while the device is idle."""
    launch = launcher(workspace, shape)
    if workspace.device.type == "cpu":
        return _HostTimer(comm, launch)
    return _GraphTimer(comm, workspace, launch)


def launcher(workspace: MNNVLAllReduceFusionWorkspace, shape: CallShape) -> Callable[[], object]:
    """A call of this shape on tensors that stay, as an engine makes it: with PDL."""

    def ones(*size: int) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, shape.dtype.value)
        return torch.ones(*size, dtype=dtype, device=workspace.device)

    row = ones(shape.num_tokens, shape.hidden_size)
    output = torch.empty_like(row)
    if shape.epilogue is Epilogue.NONE:
        return lambda: trtllm_mnnvl_allreduce(row, workspace, True, output, shape.strategy)
    residual, gamma, residual_out = ones(*row.shape), ones(shape.hidden_size), ones(*row.shape)
    return lambda: trtllm_mnnvl_fused_allreduce_add_rmsnorm(
        row, residual, gamma, workspace, 1e-5, output, residual_out, True, shape.strategy
    )


class TimedGraph:
    """Calls in a row in a CUDA graph; events inside it time all but ``num_leading`` ones.

    Whoever holds it holds the tensors too. It doesn't keep ``launch``, through which a holder could
    become part of a cycle: a garbage collection that frees a graph ends a capture under way.
    """

    def __init__(
        self, stream: torch.cuda.Stream, num_leading: int, launch: Callable[[], object]
    ) -> None:
        self._stream = stream
        self._events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(num_leading):
                launch()
            self._events[0].record()
            for _ in range(NUM_MEASURED):
                launch()
            self._events[1].record()
        torch.cuda.synchronize(stream.device)

    def replay(self) -> None:
        """Start all calls on the graph's stream."""
        with torch.cuda.stream(self._stream):
            self._graph.replay()

    def microseconds(self) -> float:
        """Of one call; the replay has ended."""
        return float(self._events[0].elapsed_time(self._events[1])) * 1e3 / NUM_MEASURED


class _GraphTimer:
    """A graph a rank."""

    def __init__(
        self,
        comm: CommBackend,
        workspace: MNNVLAllReduceFusionWorkspace,
        launch: Callable[[], object],
    ) -> None:
        self._comm, self._workspace = comm, workspace
        self._launch = launch  # holds the tensors
        for turn in range(comm.Get_size()):
            comm.barrier()
            if turn == comm.Get_rank():
                stream = torch.cuda.current_stream(workspace.device)
                self._graph = TimedGraph(stream, NUM_LEADING, launch)
        comm.barrier()

    def measure(self) -> float:
        self._comm.barrier()
        self._graph.replay()
        self._workspace.synchronize()
        return float(max(self._comm.allgather(self._graph.microseconds())))


class _HostTimer:
    """Calls on the CPU have ended when they return."""

    def __init__(self, comm: CommBackend, launch: Callable[[], object]) -> None:
        self._comm, self._launch = comm, launch

    def measure(self) -> float:
        self._comm.barrier()
        for _ in range(NUM_LEADING_HOST):
            self._launch()
        start = time.perf_counter()
        for _ in range(NUM_MEASURED_HOST):
            self._launch()
        own = (time.perf_counter() - start) * 1e6 / NUM_MEASURED_HOST
        return float(max(self._comm.allgather(own)))


def in_turns(timers: Sequence[Timer], num_rounds: int) -> list[list[float]]:
    """The rounds of each timer, in changing order, so that a drift of the clock meets all alike."""
    times: list[list[float]] = [[] for _ in timers]
    for number in range(NUM_UNMEASURED_ROUNDS + num_rounds):
        numbered = list(enumerate(timers))
        for which, timer in numbered if number % 2 else reversed(numbered):
            took = timer.measure()
            if number >= NUM_UNMEASURED_ROUNDS:
                times[which].append(took)
    return times


def percentiles(rounds: Sequence[float]) -> tuple[float, float, float]:
    """Median, 5th and 95th percentile of at least two rounds."""
    cuts = statistics.quantiles(rounds, n=20, method="inclusive")
    return statistics.median(rounds), cuts[0], cuts[-1]


@contextlib.contextmanager
def stream_of_rank(device: torch.device) -> Iterator[None]:
    """On a GPU, a stream of this rank's own: kernels of one stream cannot wait for each other."""
    if device.type == "cpu":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        torch.zeros(1, dtype=torch.int64, device=device).fill_(1)  # a replay may do this
        torch.cuda.synchronize(device)
        yield


def time_both(
    comm: CommBackend,
    device: torch.device,
    shapes: Sequence[CallShape],
    num_rounds: int,
    on_shape: Callable[[], None],
) -> list[Rounds]:
    """One-shot and two-shot on every shape, whose hidden size and dtype are one; collective.

    ``on_shape`` is called after each, by rank 0. Raises as a workspace and its calls do.
    """
    rank, world_size = comm.Get_rank(), comm.Get_size()
    most_tokens, hidden_size = max(each.num_tokens for each in shapes), shapes[0].hidden_size
    dtype: torch.dtype = getattr(torch, shapes[0].dtype.value)
    with (
        stream_of_rank(device),
        MNNVLAllReduceFusionWorkspace(
            Mapping(world_size, rank, tp_size=world_size),
            most_tokens,
            hidden_size,
            dtype,
            comm_backend=comm,
            device=device,
            force_oneshot_support=True,
        ) as workspace,
    ):
        results = []
        for shape in shapes:
            results.append(_time_shape(comm, workspace, shape, num_rounds))
            if rank == 0:
                on_shape()
        comm.barrier()
    return results


def _time_shape(
    comm: CommBackend,
    workspace: MNNVLAllReduceFusionWorkspace,
    shape: CallShape,
    num_rounds: int,
) -> Rounds:
    timers = [
        timer_of(comm, workspace, dataclasses.replace(shape, strategy=strategy))
        for strategy in (Strategy.ONESHOT, Strategy.TWOSHOT)
    ]
    return Rounds(shape, *in_turns(timers, num_rounds))


def shapes_of(
    tokens: Sequence[int], hidden_size: int, dtype: DType, epilogue: Epilogue
) -> list[CallShape]:
    """A shape for each number of tokens."""
    return [CallShape(each, hidden_size, dtype, epilogue, Strategy.AUTO) for each in tokens]
