"""Symmetric memory between virtual ranks: several ranks of one process on one GPU."""

from __future__ import annotations

import threading
from typing import Any

import torch
from cuda.bindings import driver

from flashinfer_ar.bootstrap import CommBackend, agree_on_value, agreed_step
from flashinfer_ar.driver import checked, current_context


class _Blocks:
    """The blocks of all ranks, freed together when the last rank has let go."""

    def __init__(self, addresses: list[int], context: Any) -> None:
        self.addresses = tuple(addresses)
        self._context = context
        self._num_holders = len(addresses)
        self._lock = threading.Lock()

    def let_go(self) -> None:
        with self._lock:
            self._num_holders -= 1
            if self._num_holders > 0:
                return
        with current_context(self._context):
            for address in self.addresses:
                checked(driver.cuMemFree, address)


class CudaLocalMemory:
    """One ``cuMemAlloc`` block a rank; every rank addresses all of them directly.

    ``close`` waits for nobody: a peer's kernels may still use the blocks, which live until every
    rank has closed.
    """

    multicast = None

    def __init__(self, rank: int, blocks: _Blocks, size_bytes: int) -> None:
        self._blocks: _Blocks | None = blocks
        self.peers = blocks.addresses
        self.local = self.peers[rank]
        self.size_bytes = size_bytes

    @classmethod
    def allocate(
        cls, comm: CommBackend, size_bytes: int, device: torch.device, context: Any
    ) -> CudaLocalMemory:
        """``size_bytes`` on ``device``, whose context it is, for every rank; collective.

        Raises ``SymmetricMemoryError`` on all ranks if they are on different devices or if one of
        them cannot allocate.
        """
        agree_on_value(comm, "the device of virtual ranks", str(device))
        address = 0
        try:
            with agreed_step(comm, "allocate CUDA memory"), current_context(context):
                address = int(checked(driver.cuMemAlloc, size_bytes))
        except Exception:
            if address:
                with current_context(context):
                    checked(driver.cuMemFree, address)
            raise
        blocks = _Blocks(comm.allgather(address), context)
        return cls(comm.Get_rank(), comm.bcast(blocks, 0), size_bytes)

    def close(self) -> None:
        """Let go of the blocks; safe twice."""
        if self._blocks is not None:
            self._blocks.let_go()
            self._blocks = None
