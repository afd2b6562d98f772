"""The group of ranks to use where the caller named none."""

from __future__ import annotations

from flashinfer_ar.bootstrap.comm import CommBackend
from flashinfer_ar.bootstrap.in_process import in_process_ranks
from flashinfer_ar.bootstrap.mpi import MPIBackend
from flashinfer_ar.bootstrap.torch_dist import TorchDistBackend, torch_world_size
from flashinfer_ar.errors import BootstrapError


def default_comm_backend(world_size: int) -> CommBackend:
    """The launcher's group of exactly ``world_size`` ranks: torch's default group, else MPI's.

    Never a smaller one: under torchrun MPI sees each process as a job of its own, and workspaces
    of one rank each would look right everywhere. A world of one needs no launcher.
    Raises ``BootstrapError`` where neither group has that size.
    """
    if world_size == 1:
        return in_process_ranks(1)[0]
    if torch_world_size() == world_size:
        return TorchDistBackend()
    try:
        mpi = MPIBackend()
    except BootstrapError as error:
        seen = str(error)
    else:
        if mpi.Get_size() == world_size:
            return mpi
        seen = f"MPI.COMM_WORLD has size {mpi.Get_size()}"
    raise BootstrapError(
        f"no group of world_size={world_size} ranks: torch.distributed's default group has size "
        f"{torch_world_size() or '0 (not initialised)'}; {seen}. Start the ranks with torchrun "
        f"and call init_process_group, or with mpirun -np {world_size}, or pass comm_backend"
    )
