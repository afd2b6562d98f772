"""Symmetric memory between ranks that are threads of one process."""

from __future__ import annotations

import mmap

from flashinfer_ar.bootstrap import CommBackend, InProcessBackend, agree_on_value, agreed_step
from flashinfer_ar.memory.mapped import MappedMemory, require_positive_size


class InProcessMemory(MappedMemory):
    """Anonymous memory that all the threads see; a block goes when the last rank closed."""

    @classmethod
    def allocate(cls, comm: CommBackend, size_bytes: int) -> InProcessMemory:
        """``size_bytes`` on every rank, page-aligned and zero; collective.

        Raises ``SymmetricMemoryError`` on all ranks if they disagree on the size or if one of them
        fails; ``ValueError`` for a size below 1; ``TypeError`` if ``comm`` joins processes.
        """
        if not isinstance(comm, InProcessBackend):
            raise TypeError(f"comm: allowed is an InProcessBackend, not {type(comm).__name__}")
        agree_on_value(comm, "size_bytes", size_bytes)
        require_positive_size(size_bytes)
        with agreed_step(comm, "allocate in-process memory"):
            block = _allocate(size_bytes)
        return cls(comm.Get_rank(), comm.allgather(block))


def _allocate(size_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, size_bytes)
