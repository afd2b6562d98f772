"""Memory that every rank can address on every other rank."""

from __future__ import annotations

from typing import Protocol

from flashinfer_ar.bootstrap import CommBackend
from flashinfer_ar.memory.host_shm import HostSharedMemory
from flashinfer_ar.memory.in_process import InProcessMemory


class SymmetricMemory(Protocol):
    """One block of ``size_bytes`` on every rank; addresses are this process's own.

    The object owns the mappings: they live until ``close``, or at least as long as the object.
    """

    @property
    def local(self) -> int:
        """The address of this rank's block."""
        ...

    @property
    def peers(self) -> tuple[int, ...]:
        """The address of every rank's block in rank order, this rank's own included."""
        ...

    @property
    def multicast(self) -> int | None:
        """The address whose stores reach all the blocks; ``None`` where there is none."""
        ...

    @property
    def size_bytes(self) -> int:
        """The size of each block, as it was asked for."""
        ...

    def unmap(self) -> None:
        """Give the physical memory back and keep the addresses; no kernel may use them now."""
        ...

    def map(self, comm: CommBackend) -> None:
        """Put new memory, of any content, behind the addresses after ``unmap``; collective."""
        ...

    def close(self) -> None:
        """Give the memory back: collective, safe twice; no kernel may use it any more."""
        ...


__all__ = ["HostSharedMemory", "InProcessMemory", "SymmetricMemory"]
