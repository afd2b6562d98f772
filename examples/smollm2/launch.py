"""How the ranks come to be: processes of mpirun or torchrun, or threads of this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed

import flashinfer_ar as far

Result = TypeVar("Result")


def pick_device(name: str) -> torch.device:
    """``cpu``, ``cuda``, or ``auto``: CUDA where torch has it. ValueError if it has not."""
    # All modules are loaded when CUDA starts. Loaded on first use, as is the default, a module can
    # wait for the running kernels, and among virtual ranks one of those waits for this very rank.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here; allowed are cpu, auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    # The launcher's place on this host, not the global rank, which counts other hosts' GPUs too.
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
    local_rank = next((int(os.environ[name]) for name in names if name in os.environ), 0)
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def launched_group(backend: str) -> Iterator[far.CommBackend]:
    """The group that this process was launched into: ``mpi``, ``torch``, or ``auto``.

    ``auto`` means torch under torchrun and MPI otherwise; a process without a launcher is an MPI
    group of one.
    """
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if backend == "mpi" or (backend == "auto" and not under_torchrun):
        yield far.MPIBackend()
        return
    # Gloo is enough: the group only exchanges handles, the data goes through the workspace.
    torch.distributed.init_process_group("gloo")
    try:
        yield far.TorchDistBackend()
    finally:
        torch.distributed.destroy_process_group()


def run_virtual_ranks(
    world_size: int, device: torch.device, rank_main: Callable[[far.CommBackend], Result]
) -> list[Result]:
    """Run ``rank_main`` on ``world_size`` threads; their results in rank order.

    On a GPU each thread has a stream of its own: a rank waits for its peers inside a kernel, so
    ranks that shared a stream would wait for ever.
    """

    def thread_main(comm: far.CommBackend) -> Result:
        if device.type == "cpu":
            return rank_main(comm)
        with torch.cuda.stream(torch.cuda.Stream(device)):
            return rank_main(comm)

    return far.run_ranks(world_size, thread_main)
