"""What only a GPU has: graphs, and a device that is busy with something else (virtual ranks).

Ranks are threads that share the device, and a kernel of one waits for the kernels of all. So
between a rank's launches nothing may wait for the device: tensors are made, and torch's own kernels
used once, before the ranks meet at a barrier and launch.
"""

from __future__ import annotations

import ctypes
import threading
import time

import pytest
import torch
from harness import Strategy, assert_outputs_equal, check, random_call, stream_of_rank
from workspace_tools import open_workspace

import flashinfer_ar as far

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

bf16 = torch.bfloat16
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def short_deadline(monkeypatch):
    monkeypatch.setenv("FLASHINFER_AR_TIMEOUT_S", "20")


class Staged:
    """One call of one rank: its tensors on the device, and where its outputs go."""

    def __init__(self, call, rank, device):
        self.call = call
        tensors = (call.inputs[rank], call.residual, call.gamma)
        self.tensors = [tensor.to(device, copy=True) for tensor in tensors if tensor is not None]
        num_outputs = 1 if call.residual is None else 2
        self.outputs = [torch.full_like(self.tensors[0], 7.0) for _ in range(num_outputs)]

    def take(self, other):
        """The inputs of another call of this shape."""
        for own, new in zip(self.tensors, other.tensors, strict=True):
            own.copy_(new)

    def keep(self, other):
        """The outputs of another call of this shape."""
        for own, new in zip(self.outputs, other.outputs, strict=True):
            own.copy_(new)

    def launch(self, workspace):
        call = self.call
        if call.residual is None:
            far.trtllm_mnnvl_allreduce(
                *self.tensors, workspace, call.launch_with_pdl, *self.outputs, call.strategy
            )
        else:
            far.trtllm_mnnvl_fused_allreduce_add_rmsnorm(
                *self.tensors,
                workspace,
                call.epsilon,
                *self.outputs,
                call.launch_with_pdl,
                call.strategy,
            )


# Graphs

WORLD_SIZE = 4
NUM_ROUNDS = 20
CAPTURED = (
    (3, 256, bf16, {"strategy": Strategy.ONESHOT, "fused": True, "launch_with_pdl": True}),
    (129, 64, bf16, {"strategy": Strategy.TWOSHOT}),
    (2, 256, bf16, {"strategy": Strategy.TWOSHOT, "fused": True, "launch_with_pdl": True}),
    (1, 64, torch.float32, {"strategy": Strategy.ONESHOT, "launch_with_pdl": True}),
    (64, 64, torch.float16, {"strategy": Strategy.TWOSHOT, "fused": True}),
)
EAGER = (
    (5, 256, bf16, {"strategy": Strategy.ONESHOT, "fused": True}),
    (7, 64, bf16, {"strategy": Strategy.TWOSHOT, "launch_with_pdl": True}),
)


def make_calls(shapes, seed):
    return [
        random_call(WORLD_SIZE, num_tokens, hidden, dtype, seed=100 * seed + i, **how)
        for i, (num_tokens, hidden, dtype, how) in enumerate(shapes)
    ]


def capture(launches, stream):
    """A graph of ``launches``; other threads must not touch the device meanwhile."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        launches()
    return graph


def capture_in_turn(comm, launches):
    """Every rank's graph. Capturing runs nothing, so no rank waits for another one's kernel."""
    graph = None
    for turn in range(comm.Get_size()):
        comm.barrier()
        if turn == comm.Get_rank():
            graph = capture(launches, torch.cuda.current_stream(DEVICE))
    torch.cuda.synchronize(DEVICE)
    comm.barrier()
    return graph


def test_graphs_are_replayed_among_eager_calls():
    """Inputs change from round to round, and nothing waits for the device in between."""
    rounds = [(make_calls(CAPTURED, i), make_calls(EAGER, 50 + i)) for i in range(NUM_ROUNDS)]

    def rank_main(comm):
        rank = comm.Get_rank()
        arguments = {"buffer_size_in_bytes": 1 << 20, "hidden_dim": 256, "dtype": bf16}
        with (
            stream_of_rank(DEVICE),
            open_workspace(comm, DEVICE, **arguments) as workspace,
        ):
            static = [Staged(call, rank, DEVICE) for call in rounds[0][0]]
            staged = [
                ([Staged(call, rank, DEVICE) for call in captured],
                 [Staged(call, rank, DEVICE) for call in eager])
                for captured, eager in rounds
            ]  # fmt: skip
            for own, new in zip(static, staged[0][0], strict=True):
                own.take(new)  # torch's first copy on the device
                new.keep(own)
            torch.zeros(1, dtype=torch.int64, device=DEVICE).fill_(1)  # a replay may do this

            def launches():
                for call in static:
                    call.launch(workspace)

            graph = capture_in_turn(comm, launches)
            for captured, eager in staged:
                for own, new in zip(static, captured, strict=True):
                    own.take(new)
                graph.replay()
                for call in eager:
                    call.launch(workspace)
                for own, new in zip(static, captured, strict=True):
                    new.keep(own)
            workspace.synchronize()
            comm.barrier()
            return [
                tuple(output.cpu() for output in call.outputs)
                for captured, eager in staged
                for call in (*captured, *eager)
            ]

    results = far.run_ranks(WORLD_SIZE, rank_main)
    expected = [call.expected() for calls in rounds for part in calls for call in part]
    for rank, outputs in enumerate(results):
        assert_outputs_equal(outputs, expected, f"rank {rank}")


# A busy device

HOLD_S = 2.0
HOLD = """
extern "C" __global__ void __launch_bounds__(1024, 2) hold(unsigned long long nanoseconds) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}
"""


class Holder:
    """A kernel that fills all but four SMs' worth of threads for two seconds."""

    def __init__(self):
        from cuda.bindings import driver

        from flashinfer_ar.driver import checked, current_context, primary_context
        from flashinfer_ar.jit import nvrtc

        self._driver, self._checked = driver, checked
        self._context = primary_context(DEVICE.index)
        self._current = current_context
        capability = torch.cuda.get_device_capability(DEVICE)
        cubin = nvrtc.build_cubin("hold", HOLD, nvrtc.target_of_device(*capability)).read_bytes()
        with current_context(self._context):
            module = checked(driver.cuModuleLoadData, cubin)
            self._function = checked(driver.cuModuleGetFunction, module, b"hold")
        self._num_ctas = 2 * torch.cuda.get_device_properties(DEVICE).multi_processor_count - 8
        self._stream = torch.cuda.Stream(DEVICE)

    def start(self):
        arguments = ((int(HOLD_S * 1e9),), (ctypes.c_uint64,))
        stream = self._driver.CUstream(self._stream.cuda_stream)
        grid, block = (self._num_ctas, 1, 1), (1024, 1, 1)
        with self._current(self._context):
            self._checked(
                self._driver.cuLaunchKernel, self._function, *grid, *block, 0, stream, arguments, 0
            )


def test_a_busy_device_makes_calls_late_and_no_more():
    """Some CTAs find room, and wait in it for others that find none for two seconds."""
    holder = Holder()
    ready = threading.Barrier(WORLD_SIZE)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def hold(rank):
        if rank == 0:
            holder.start()
            time.sleep(0.1)
            events[0].record()
        ready.wait(timeout=30.0)

    def look(rank):
        if rank == 0:
            events[1].record()

    calls = [
        random_call(
            WORLD_SIZE, 64, 4096, bf16, fused=True, seed=i, strategy=Strategy.ONESHOT, before=before
        )
        for i, before in enumerate((hold, look))
    ]
    check(WORLD_SIZE, calls, DEVICE, hidden_dim=4096, dtype=bf16)
    assert events[0].elapsed_time(events[1]) > 500 * HOLD_S  # else nothing was held up
