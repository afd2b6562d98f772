"""A peer that does not come: the deadline ends every wait, and tells who waited for whom."""

from __future__ import annotations

import re
import time

import pytest
import torch
from harness import Strategy, check, random_call, stream_of_rank
from workspace_tools import epoch_word, is_armed, open_workspace

import flashinfer_ar as far
from flashinfer_ar.calls import CallShape
from flashinfer_ar.jit import DType, Epilogue
from flashinfer_ar.jit.params import Control

WORLD_SIZE, MISSING = 3, 2
NUM_GOOD_CALLS = 3
SHAPE = (4, 64)  # one stripe, so in a two-shot call rank 0 owns all of it

# For whose data ranks 0 and 1 wait. In a two-shot call rank 1 needs nothing but rank 0's sums, and
# must not get any: rank 0 gave up half a second earlier.
CASES = {
    "oneshot": (Strategy.ONESHOT, False, "kernel oneshot (none)", (2, 2)),
    "oneshot-fused": (Strategy.ONESHOT, True, "kernel oneshot (add_rms_norm)", (2, 2)),
    "twoshot": (Strategy.TWOSHOT, False, "kernel twoshot (none)", (2, 0)),
    "twoshot-fused": (Strategy.TWOSHOT, True, "kernel twoshot (add_rms_norm)", (2, 0)),
}


def stage(call, rank, device):
    """The arguments of a call on the device, and tensors for its outputs."""
    tensors = [call.inputs[rank], call.residual, call.gamma]
    tensors = [tensor.to(device, copy=True) for tensor in tensors if tensor is not None]
    return tensors, torch.empty_like(tensors[0]), torch.empty_like(tensors[0])


def launch(call, staged, workspace):
    tensors, output, residual_out = staged
    if call.residual is None:
        far.trtllm_mnnvl_allreduce(*tensors, workspace, False, output, call.strategy)
    else:
        far.trtllm_mnnvl_fused_allreduce_add_rmsnorm(
            *tensors, workspace, call.epsilon, output, residual_out, strategy=call.strategy
        )


def raised(action):
    """The text of the ``AllReduceTimeoutError`` that ``action`` must raise, and when it came."""
    started = time.monotonic()
    with pytest.raises(far.AllReduceTimeoutError) as caught:
        action()
    return str(caught.value), time.monotonic() - started


def wait_in_vain(call, staged, workspace):
    """A call that times out, and what comes after it: the ring holds half a call."""

    def wait():
        launch(call, staged, workspace)
        workspace.synchronize()

    found = [raised(wait)]
    epoch = epoch_word(workspace)
    found.append(raised(lambda: launch(call, staged, workspace)))
    found.append(raised(workspace.synchronize))
    assert epoch_word(workspace) == epoch  # nothing was launched
    return found


@pytest.mark.parametrize(("strategy", "fused", "kernel", "peers"), CASES.values(), ids=CASES)
def test_every_waiting_rank_raises_and_names_the_wait(
    strategy, fused, kernel, peers, device, monkeypatch
):
    call = random_call(WORLD_SIZE, *SHAPE, torch.bfloat16, fused=fused, strategy=strategy)
    check(WORLD_SIZE, [call], device)  # builds the kernel, so that no deadline sees it
    monkeypatch.setenv("FLASHINFER_AR_TIMEOUT_S", "2")

    def rank_main(comm):
        rank = comm.Get_rank()
        with stream_of_rank(device), open_workspace(comm, device) as workspace:
            staged = stage(call, rank, device)
            comm.barrier()
            for _ in range(NUM_GOOD_CALLS):
                launch(call, staged, workspace)
            workspace.synchronize()
            comm.barrier()
            time.sleep(0.5 * rank)
            found = None if rank == MISSING else wait_in_vain(call, staged, workspace)
            comm.barrier()
        return found

    results = far.run_ranks(WORLD_SIZE, rank_main, timeout_s=30.0)[:MISSING]
    for rank, (peer, ((message, waited_s), *later)) in enumerate(zip(peers, results, strict=True)):
        start = (
            f"rank {rank} waited 2 s (FLASHINFER_AR_TIMEOUT_S) for data of rank {peer}: {kernel}"
        )
        assert message.startswith(start)
        place = rf", token [0-3] of \[4, 64\] bfloat16, epoch {NUM_GOOD_CALLS}\."
        assert re.match(place, message[len(start) :])
        assert 2.0 <= waited_s < 20.0
        assert [text for text, _ in later] == [message] * 2
        assert all(seconds < 1.5 for _, seconds in later)  # not for another deadline
    check(WORLD_SIZE, [call], device)


def test_calls_queued_behind_a_timeout_send_nothing(device):
    """They would overwrite what a late peer has still to read, and it would take their data."""

    def rank_main(comm):
        rank = comm.Get_rank()
        with stream_of_rank(device), open_workspace(comm, device) as workspace:
            call = random_call(WORLD_SIZE, 5, 64, torch.bfloat16)
            staged = [stage(call, rank, device) for _ in range(2)]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            comm.barrier()
            if rank == 0:
                mark_expired(workspace)
                for strategy, (tensors, output, _) in zip(
                    (Strategy.ONESHOT, Strategy.TWOSHOT), staged, strict=True
                ):
                    launch_unchecked(workspace, tensors[0], output, strategy)
                synchronize(device)
            comm.barrier()
            return is_armed(workspace)

    assert far.run_ranks(WORLD_SIZE, rank_main) == [True] * WORLD_SIZE


def mark_expired(workspace):
    """As a kernel does whose wait outlived the deadline, in a call before."""
    address = workspace._substrate.control + Control.expired.offset
    workspace._substrate.fill(address, 4, 1)


def launch_unchecked(workspace, row, output, strategy):
    """The launch alone: as with a graph, nothing looks at the record of the calls before."""
    shape = CallShape(*row.shape, DType.BFLOAT16, Epilogue.NONE, strategy)
    call = workspace.prepare(shape)
    call.place(row.data_ptr(), output.data_ptr())
    call.launch.start(False)


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def test_close_reports_a_timeout_that_nobody_has_seen(device, monkeypatch):
    monkeypatch.setenv("FLASHINFER_AR_TIMEOUT_S", "1")

    def rank_main(comm):
        with stream_of_rank(device):
            workspace = open_workspace(comm, device)
            call = random_call(2, 5, 64, torch.bfloat16)
            tensors, output, _ = stage(call, comm.Get_rank(), device)
            synchronize(device)
            comm.barrier()
            if comm.Get_rank() == 0:
                launch_unchecked(workspace, tensors[0], output, Strategy.ONESHOT)
                with pytest.raises(far.AllReduceTimeoutError, match="rank 0 waited 1 s"):
                    workspace.close()
                assert output.isnan().all()
            comm.barrier()
            workspace.close()  # safe twice, and quiet then

    far.run_ranks(2, rank_main, timeout_s=30.0)
