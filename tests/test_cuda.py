"""What only a GPU has: several streams, and a device that is busy with something else.

Ranks are virtual: threads that share the device (:mod:`cuda_tools`).
"""

from __future__ import annotations

import threading
import time

import pytest
import torch
from cuda_tools import DEVICE, DeviceFunction, Staged, needs_cuda, raw_capture
from harness import Strategy, assert_outputs_equal, check, random_call
from workspace_tools import open_workspace

import flashinfer_ar as far

pytestmark = needs_cuda

bf16 = torch.bfloat16


@pytest.fixture(autouse=True)
def short_deadline(monkeypatch):
    monkeypatch.setenv("FLASHINFER_AR_TIMEOUT_S", "20")


# Streams

NUM_CALLS = 100
SLOW_RANK, SLOW_CALLS = 1, range(3, NUM_CALLS, 10)
SLOW_CYCLES = 5_000_000  # more than two milliseconds, in which a next call could overtake


def alternating_calls(world_size):
    shapes = ((3, 256), (70, 64), (1, 64))
    return [
        random_call(
            world_size,
            *shapes[i % 3],
            bf16,
            fused=i % 2 == 0,
            seed=i,
            strategy=(Strategy.ONESHOT, Strategy.TWOSHOT)[i // 2 % 2],
            launch_with_pdl=i % 5 < 2,
        )
        for i in range(NUM_CALLS)
    ]


def nothing(workspace, staged_call, i, spare_stream):
    pass


def run_on_streams(comm, calls, before):
    """The outputs of calls that take turns on two streams; ``before`` runs ahead of each."""
    rank = comm.Get_rank()
    with torch.cuda.device(DEVICE), open_workspace(comm, DEVICE) as workspace:
        *streams, spare_stream = [torch.cuda.Stream(DEVICE) for _ in range(3)]
        staged = [Staged(call, rank, DEVICE) for call in calls]
        torch.cuda._sleep(1)  # so that it is loaded
        torch.cuda.synchronize(DEVICE)
        comm.barrier()
        for i, call in enumerate(staged):
            before(workspace, call, i, spare_stream)
            with torch.cuda.stream(streams[i % 2]):
                if rank == SLOW_RANK and i in SLOW_CALLS:
                    torch.cuda._sleep(SLOW_CYCLES)
                call.launch(workspace)
        workspace.synchronize()
        comm.barrier()
        outputs = [call.results() for call in staged]
        comm.barrier()
    return outputs


def check_on_streams(world_size, before=nothing):
    calls = alternating_calls(world_size)
    results = far.run_ranks(world_size, lambda comm: run_on_streams(comm, calls, before))
    expected = [call.expected() for call in calls]
    for rank, outputs in enumerate(results):
        assert_outputs_equal(outputs, expected, f"rank {rank}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_calls_alternate_between_two_streams(world_size):
    """Nobody orders the streams but the workspace."""
    check_on_streams(world_size)


def test_a_capture_between_calls_keeps_the_order_of_their_streams():
    """The call after a capture has to wait for the call before it, which is on another stream."""

    def capture(workspace, staged_call, i, spare_stream):
        if i - 1 in SLOW_CALLS:
            with raw_capture(spare_stream) as answers:
                staged_call.launch(workspace)
            assert answers == ["CUDA_SUCCESS"]

    check_on_streams(2, capture)


# A busy device

WORLD_SIZE = 4
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
        self._function = DeviceFunction("hold", HOLD)
        self._num_ctas = 2 * torch.cuda.get_device_properties(DEVICE).multi_processor_count - 8
        self._stream = torch.cuda.Stream(DEVICE)

    def start(self):
        with torch.cuda.stream(self._stream):
            self._function.launch(self._num_ctas, 1024, int(HOLD_S * 1e9))


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
