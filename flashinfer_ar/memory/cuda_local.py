"""Symmetric memory between virtual ranks: several ranks of one process on one GPU."""

from __future__ import annotations

from typing import Any

import torch
from cuda.bindings import driver

from flashinfer_ar.bootstrap import CommBackend, agree_on_value, agreed_step
from flashinfer_ar.driver import checked, current_context


class CudaLocalMemory:
    """One ``cuMemAlloc`` block a rank; every rank addresses all of them directly."""

    multicast = None

    def __init__(self, comm: CommBackend, blocks: list[int], size_bytes: int, context: Any) -> None:
        self._comm = comm
        self._context = context
        self.peers = tuple(blocks)
        self.size_bytes = size_bytes
        self._open = True

    @property
    def local(self) -> int:
        """The address of this rank's block."""
        return self.peers[self._comm.Get_rank()]

    @classmethod
    def allocate(
        cls, comm: CommBackend, size_bytes: int, device: torch.device, context: Any
    ) -> CudaLocalMemory:
        """``size_bytes`` on ``device``, whose context it is, for every rank; collective.

        Raises ``SymmetricMemoryError`` on all ranks if they are on different devices or if one of
        them cannot allocate.
        """
        agree_on_value(comm, "the device of virtual ranks", str(device))
        with agreed_step(comm, "allocate CUDA memory"), current_context(context):
            block = int(checked(driver.cuMemAlloc, size_bytes))
        return cls(comm, comm.allgather(block), size_bytes, context)

    def close(self) -> None:
        """Free this rank's block when no rank uses it any more: collective, safe twice."""
        if not self._open:
            return
        self._open = False
        self._comm.barrier()
        with current_context(self._context):
            checked(driver.cuMemFree, self.local)
