"""One rank of the tests in test_cuda_processes.py: ``process_worker.py LAUNCHER DEVICE JOB...``.

The arguments and what is printed are those of api_worker.py. A job takes the rank's group and
device; virtual ranks run the same ones.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from api_worker import device_of, meet, part
from cuda_tools import Staged, capture_in_turn, make_calls
from harness import Strategy, assert_outputs_equal, stream_of_rank
from test_stress import run_random_calls
from workspace_tools import is_armed, open_workspace

import flashinfer_ar as far

bf16, fp32 = torch.bfloat16, torch.float32
ONESHOT, TWOSHOT = ({"strategy": kind} for kind in (Strategy.ONESHOT, Strategy.TWOSHOT))
FUSED, PDL = {"fused": True}, {"launch_with_pdl": True}
SHAPES = (
    (3, 256, bf16, ONESHOT | FUSED | PDL),
    (70, 64, bf16, TWOSHOT),
    (2, 256, fp32, TWOSHOT | FUSED | PDL),
)
SLOW_CYCLES = 20_000_000  # ten milliseconds


class Replays:
    """Calls of one rank, eager and captured, whose inputs change from one turn to the next."""

    def __init__(self, comm, device, workspace):
        self._comm, self._device, self._workspace = comm, device, workspace
        self._num_turns = 0
        self._static = self._staged()
        if device.type == "cuda":  # torch loads what a replay and `slow_down` may use
            torch.zeros(1, dtype=torch.int64, device=device).fill_(1)
            torch.cuda._sleep(1)
            torch.cuda.synchronize(device)
        self._graph = capture_in_turn(comm, device, lambda: self._launch(self._static))

    def _staged(self):
        calls = make_calls(self._comm.Get_size(), SHAPES, self._num_turns)
        return [Staged(call, self._comm.Get_rank(), self._device) for call in calls]

    def _launch(self, staged):
        for call in staged:
            call.launch(self._workspace)

    def start(self):
        """Replay, eager calls, replay; and what they should give.

        The last rank is late: what its peers do next must not disturb it.
        """
        self._num_turns += 1
        staged = self._staged()
        self._workspace.synchronize()
        self._comm.barrier()
        if self._device.type == "cuda" and self._comm.Get_rank() == self._comm.Get_size() - 1:
            torch.cuda._sleep(SLOW_CYCLES)
        for own, new in zip(self._static, staged, strict=True):
            own.take(new)
        self._graph.replay()
        self._launch(staged)
        self._graph.replay()
        return staged

    def check(self, staged):
        """Compare the outputs of ``start`` with the reference."""
        expected = [call.call.expected() for call in staged]
        for how, calls in (("eager", staged), ("replayed", self._static)):
            outputs = [call.results() for call in calls]
            label = f"rank {self._comm.Get_rank()}, turn {self._num_turns}, {how}"
            assert_outputs_equal(outputs, expected, label)


def graphs(comm, device):
    """Replays among eager calls, with new inputs each time."""
    with stream_of_rank(device), open_workspace(comm, device) as workspace:
        replays = Replays(comm, device, workspace)
        for _ in range(8):
            replays.check(replays.start())
        comm.barrier()


def checkpoint(comm, device):
    """Memory goes and comes back three times; graphs captured before are right afterwards."""
    with stream_of_rank(device), open_workspace(comm, device) as workspace:
        replays = Replays(comm, device, workspace)
        addresses = workspace.uc_ptrs
        for _ in range(3):
            running = replays.start()
            workspace.checkpoint_prepare()  # waits for them
            replays.check(running)
            try:
                running[0].launch(workspace)
            except far.FlashInferARError as error:
                assert "checkpoint" in str(error), error
            else:
                raise AssertionError("a call between prepare and restore returned")
            workspace.checkpoint_restore()
            assert workspace.uc_ptrs == addresses
            assert is_armed(workspace)
            comm.barrier()
            replays.check(replays.start())
        comm.barrier()
        workspace.checkpoint_prepare()  # and is closed in this state


def timed_out(rank, world_size, launch, workspace):
    """Run ``launch``, whose call waits for the last rank in vain: the deadline's error."""
    started = time.monotonic()
    try:
        launch()
        workspace.synchronize()
    except far.AllReduceTimeoutError as error:
        assert f"rank {rank} waited 3 s" in str(error), error
        assert f"for data of rank {world_size - 1}: kernel oneshot" in str(error), error
        assert 3.0 <= time.monotonic() - started < 30.0
    else:
        raise AssertionError("the call returned")


def until_the_last_rank_leaves(comm, device, leave):
    """A good replay on all ranks; then one without the last rank, which called ``leave``."""
    rank, world_size = comm.Get_rank(), comm.Get_size()
    os.environ["FLASHINFER_AR_TIMEOUT_S"] = "3"
    with stream_of_rank(device):
        workspace = open_workspace(comm, device)
        [call] = make_calls(world_size, SHAPES[:1], 0)
        staged = Staged(call, rank, device)
        graph = capture_in_turn(comm, device, lambda: staged.launch(workspace))
        graph.replay()
        workspace.synchronize()
        assert_outputs_equal([staged.results()], [call.expected()], f"rank {rank}")
        comm.barrier()
        if rank == world_size - 1:
            leave(workspace)
            return
        timed_out(rank, world_size, graph.replay, workspace)
        try:
            staged.launch(workspace)
        except far.AllReduceTimeoutError:
            workspace.close()
        else:
            raise AssertionError("a call after the timeout returned")


def peer_closed(comm, device):
    """The last rank gives its memory back and goes on; its peers' stores still have a place."""
    until_the_last_rank_leaves(comm, device, lambda workspace: workspace.close())


def peer_gone(comm, device):
    """The last rank's process ends without a word, and its CUDA context with it."""

    def leave(workspace):
        announce(comm, "peer_gone")
        os._exit(0)

    until_the_last_rank_leaves(comm, device, leave)


def shared_device(comm, device):
    """Without the switch, ranks that share a device are refused, all with the same text."""
    from flashinfer_ar.memory.device_place import place_of

    device = torch.device("cuda", 0)
    try:
        open_workspace(comm, device)
    except far.SymmetricMemoryError as error:
        text = str(error)
    else:
        raise AssertionError("it was made")
    everybody = list(range(comm.Get_size()))
    assert f"ranks {everybody} do not have a device of their own" in text, text
    assert text.count(f"device {place_of(device.index).pci_bus_id}") == comm.Get_size(), text
    assert set(comm.allgather(text)) == {text}


def random_calls(comm, device):
    """The long run of test_stress.py."""
    run_random_calls(comm, device)


def unicast(comm, device):
    """With the ecosystem's switch off, no rank makes a multicast object, and calls are right."""
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
    with stream_of_rank(device), open_workspace(comm, device) as workspace:
        assert workspace.mc_ptr is None
        assert len(set(workspace.uc_ptrs)) == comm.Get_size()
        replays = Replays(comm, device, workspace)
        replays.check(replays.start())
        comm.barrier()


JOBS = {
    job.__name__: job
    for job in (
        graphs, checkpoint, peer_closed, peer_gone, shared_device, random_calls, unicast,
    )
}  # fmt: skip


def announce(comm, job):
    print(f"rank {comm.Get_rank()} of {comm.Get_size()}: {job} ok", flush=True)


def main(launcher, device_name, *jobs):
    comm = meet(launcher)
    device = device_of(device_name, comm.Get_rank())
    for job in jobs:
        JOBS[job](comm, device)
        announce(comm, job)
    part(launcher)


if __name__ == "__main__":
    main(*sys.argv[1:])
