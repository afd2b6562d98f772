"""One rank of the tests on two hosts: ``hosts_worker.py FOLDER JOB...``.

Its GPU is a fake: the machine room is FOLDER, so that memory comes to the other host by "fabric
handles" and the host's kernels run on it. A rank prints ``rank R of W: JOB ok`` as in api_worker.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import time
from pathlib import Path

import api_worker
import pytest
import torch
from fake_driver import FakeDriver
from fake_machine import FABRIC, FD
from fake_ranks import FakeCudaSubstrate, device_of
from harness import Strategy, assert_outputs_equal, random_call
from workspace_tools import CPU, open_workspace

import flashinfer_ar as far
from flashinfer_ar import workspace
from flashinfer_ar.bootstrap import host_identity
from flashinfer_ar.errors import AllReduceTimeoutError, BootstrapError, SymmetricMemoryError
from flashinfer_ar.memory import HostSharedMemory
from flashinfer_ar.memory.fd_exchange import exchange_fds

DEADLINE_S = 2


def on_fabric(comm, driver):
    """The API's calls, bit for bit; all memory of peers came as fabric handles."""
    api_worker.calls(comm, CPU)
    api_worker.default_group(comm, CPU)
    kinds = [kind for _, kind in driver.calls("cuMemImportFromShareableHandle")]
    assert kinds == [FABRIC] * 2 * (comm.Get_size() - 1)
    driver.check_balanced()
    assert driver.open_fds() == []


def apart(comm, driver):
    """Ranks of the two hosts differ in who they say they are, and no descriptor gets across."""
    size = comm.Get_size()
    hosts = [host.hostname for host in comm.allgather(host_identity())]
    assert hosts == ["a"] * (size // 2) + ["b"] * (size // 2)
    assert len(set(comm.allgather(host_identity()))) == 2
    with pytest.raises(SymmetricMemoryError, match="exchange file descriptors failed on"):
        exchange_fds(comm, 0)
    with pytest.raises(SymmetricMemoryError, match="ranks of one machine that see one /dev/shm"):
        HostSharedMemory.allocate(comm, 4096)
    half = comm.Split(comm.Get_rank() * 2 // size, comm.Get_rank())
    for fd in exchange_fds(half, 0):
        os.close(fd)
    driver.refuse(FABRIC, driver.CUresult.CUDA_ERROR_NOT_PERMITTED)
    with pytest.raises(SymmetricMemoryError, match="IMEX"):
        open_workspace(comm)
    assert not any(each.requestedHandleTypes == FD for _, each, _ in driver.calls("cuMemCreate"))
    driver.heal()
    driver.check_balanced()


def cut_off(comm, driver):
    """Call after call until the other host is gone: then the deadline's errors, and a clean end."""
    rank, size = comm.Get_rank(), comm.Get_size()
    os.environ["FLASHINFER_AR_TIMEOUT_S"] = str(DEADLINE_S)
    call = random_call(size, 3, 64, torch.bfloat16)
    opened = open_workspace(comm)
    with pytest.raises(AllReduceTimeoutError) as caught:
        for number in itertools.count():
            before = time.monotonic()
            output = far.trtllm_mnnvl_allreduce(
                call.inputs[rank], opened, False, None, Strategy.ONESHOT
            )
            assert_outputs_equal([(output,)], [call.expected()], f"rank {rank}")
            if number == 3:
                print(f"rank {rank} of {size}: running", flush=True)
    assert DEADLINE_S <= time.monotonic() - before < DEADLINE_S + 5
    assert f"rank {rank} waited {DEADLINE_S} s" in str(caught.value), caught.value
    with pytest.raises(BootstrapError, match=f"waited {DEADLINE_S} s for its peers"):
        comm.barrier()
    opened.close()
    driver.check_balanced()
    print(f"rank {rank} of {size}: {caught.value}", flush=True)


JOBS = {"on_fabric": on_fabric, "apart": apart, "cut_off": cut_off}


def main(folder, *jobs):
    comm = far.MPIBackend()
    ordinal = int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])
    driver = FakeDriver(Path(folder), socket.gethostname(), ordinal)
    device = device_of(driver, host_identity())
    workspace.substrate_of = lambda _: FakeCudaSubstrate(device)
    for job in jobs:
        JOBS[job](comm, driver)
        print(f"rank {comm.Get_rank()} of {comm.Get_size()}: {job} ok", flush=True)
    if "cut_off" in jobs:
        os._exit(0)  # MPI's own end would wait for the host that is gone


if __name__ == "__main__":
    main(*sys.argv[1:])
