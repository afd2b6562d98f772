"""Symmetric memory out of the process's own address space, one mapping a rank."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

from flashinfer_ar.bootstrap import CommBackend


class MappedMemory:
    """The blocks of all ranks as this process sees them; a ``SymmetricMemory``.

    A block stays mapped while anyone holds its ``mmap`` object, so ``close`` lets go and waits for
    nobody: it cannot hang on a lost peer, and no peer that still stores into a block loses it.
    """

    multicast: int | None = None

    def __init__(self, rank: int, blocks: Sequence[mmap.mmap]) -> None:
        self._rank = rank
        self._blocks = tuple(blocks)
        self.size_bytes = len(blocks[rank])
        self.peers = tuple(_address(block) for block in blocks)
        self.local = self.peers[rank]

    def unmap(self) -> None:
        """Give this rank's pages back; the next access finds new ones, of zeros."""
        self._blocks[self._rank].madvise(mmap.MADV_REMOVE)

    def map(self, comm: CommBackend) -> None:
        """Nothing to do but to meet: the pages come with the first access."""
        comm.barrier()

    def close(self) -> None:
        """Let go of every block; the addresses are gone (0 and empty) from here on."""
        self._blocks = ()
        self.peers = ()
        self.local = 0


def require_positive_size(size_bytes: int) -> None:
    """``ValueError`` unless ``size_bytes`` is positive; for after the ranks agreed on it."""
    if size_bytes < 1:
        raise ValueError(f"size_bytes={size_bytes}: allowed is a whole number from 1")


def _address(block: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(block))
