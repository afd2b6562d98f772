"""Runs a command's work on all ranks: those that a launcher started, or virtual ones."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import typer

from flashinfer_ar import env
from flashinfer_ar.bootstrap import CommBackend, MPIBackend, TorchDistBackend, run_ranks
from flashinfer_ar.cli.options import failed
from flashinfer_ar.doctor import end_without_peers
from flashinfer_ar.doctor.launchers import Launch, launch
from flashinfer_ar.errors import BootstrapError, FlashInferARError

# The most that CUDA has. Each virtual rank has a stream of its own, whose kernels wait for those of
# the others: two streams in one queue could wait for ever.
_NUM_QUEUES = 32

Result = TypeVar("Result")
Body = Callable[[CommBackend, torch.device], Result]


def launch_of(virtual_ranks: object, option: str) -> Launch | None:
    """How a launcher started this process, if it did; not with virtual ranks asked for too."""
    launched = launch()
    if launched is not None and virtual_ranks is not None:
        seen = f"{launched.launcher} started {launched.num_ranks} ranks"
        raise typer.BadParameter(f"{virtual_ranks}; {seen}", param_hint=f"'{option}'")
    if launched is None:  # before anything starts CUDA, which reads it then
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(_NUM_QUEUES))
    return launched


def on_virtual_ranks(num_ranks: int, body: Body[Result]) -> Result:
    """Rank 0's result of ``body`` on threads that share one GPU or, where there is none, the CPU.

    An error ends the command with status 1.
    """
    try:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        if device.type == "cuda" and num_ranks > _NUM_QUEUES:
            raise ValueError(f"{num_ranks} virtual ranks: allowed on one GPU is 1 to {_NUM_QUEUES}")
        return run_ranks(num_ranks, lambda comm: body(comm, device))[0]
    except (FlashInferARError, ValueError) as error:
        raise failed(str(error)) from None


def on_launched_ranks(launch: Launch, body: Body[Result]) -> Result:
    """This rank's result of ``body``, with a GPU for each rank or, without GPUs, on the CPU.

    An error ends the process with status 1: an ordinary exit would wait for peers.
    """
    try:
        with _group(launch) as comm:
            return body(comm, _device_of(launch))
    except (FlashInferARError, ValueError) as error:
        typer.echo(f"Error: rank {launch.rank}: {error}", err=True)
        end_without_peers(launch.rank)
        raise


def _device_of(launch: Launch) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def _group(launch: Launch) -> Iterator[CommBackend]:
    if launch.launcher == "torchrun":
        with _torch_group() as comm:
            yield comm
        return
    mpi = MPIBackend()
    if mpi.Get_size() != launch.num_ranks:
        raise BootstrapError(
            f"{launch.launcher} started {launch.num_ranks} ranks and MPI sees {mpi.Get_size()}: "
            f"mpi4py loaded the MPI library of another launcher"
        )
    yield mpi


@contextlib.contextmanager
def _torch_group() -> Iterator[CommBackend]:
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=env.timeout_s()))
    except (AttributeError, RuntimeError) as error:  # no gloo; a lost peer
        raise BootstrapError(f"torch.distributed: {error}") from error
    try:
        yield TorchDistBackend()
    finally:
        dist.destroy_process_group()
