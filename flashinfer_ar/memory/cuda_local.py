"""Symmetric memory between virtual ranks: several ranks of one process on one GPU."""

from __future__ import annotations

import contextlib
import threading

from flashinfer_ar.bootstrap import CommBackend, agree_on_value, agreed_step
from flashinfer_ar.driver import checked, current_context
from flashinfer_ar.memory.cuda_device import (
    CudaDevice,
    HandleKind,
    access_of,
    granularity_of,
    properties_of,
    round_up,
)


class _Block:
    """One rank's memory at addresses that stay."""

    def __init__(self, device: CudaDevice, size_bytes: int) -> None:
        self._device = device
        self._properties = properties_of(device, HandleKind.POSIX_FD)
        self._size_bytes = round_up(size_bytes, granularity_of(device, self._properties))
        self._is_mapped = False
        self.address = int(checked(device.api.cuMemAddressReserve, self._size_bytes, 0, 0, 0))

    def map(self) -> None:
        api = self._device.api
        handle = checked(api.cuMemCreate, self._size_bytes, self._properties, 0)
        try:
            checked(api.cuMemMap, self.address, self._size_bytes, 0, handle, 0)
        finally:
            checked(api.cuMemRelease, handle)  # the mapping keeps the memory
        self._is_mapped = True
        access = access_of(self._device)
        checked(api.cuMemSetAccess, self.address, self._size_bytes, [access], 1)

    def unmap(self) -> None:
        if self._is_mapped:
            self._is_mapped = False
            checked(self._device.api.cuMemUnmap, self.address, self._size_bytes)

    def free(self) -> None:
        self.unmap()
        checked(self._device.api.cuMemAddressFree, self.address, self._size_bytes)


class _Blocks:
    """The blocks of all ranks, freed together when the last rank has let go."""

    def __init__(self, blocks: list[_Block]) -> None:
        self.addresses = tuple(block.address for block in blocks)
        self._blocks = blocks
        self._num_holders = len(blocks)
        self._lock = threading.Lock()

    def let_go(self) -> None:
        with self._lock:
            self._num_holders -= 1
            if self._num_holders == 0:
                for block in self._blocks:
                    block.free()


class CudaLocalMemory:
    """One block a rank on one GPU; every rank addresses all of them directly.

    ``close`` waits for nobody: a peer's kernels may still use the blocks, which live until every
    rank has closed.
    """

    multicast = None

    def __init__(
        self, rank: int, own: _Block, blocks: _Blocks, size_bytes: int, device: CudaDevice
    ) -> None:
        self._own = own
        self._device = device
        self._blocks: _Blocks | None = blocks
        self.peers = blocks.addresses
        self.local = self.peers[rank]
        self.size_bytes = size_bytes

    @classmethod
    def allocate(cls, comm: CommBackend, size_bytes: int, device: CudaDevice) -> CudaLocalMemory:
        """``size_bytes`` on ``device`` for every rank; collective.

        Raises ``SymmetricMemoryError`` on all ranks if they are on different devices or if one of
        them cannot allocate.
        """
        agree_on_value(comm, "the device of virtual ranks", device.ordinal)
        with current_context(device.context, device.api), contextlib.ExitStack() as undo:
            with agreed_step(comm, "allocate CUDA memory"):
                own = _Block(device, size_bytes)
                undo.callback(own.free)
                own.map()
            blocks = comm.bcast(_Blocks(comm.allgather(own)), 0)
            undo.pop_all()
        return cls(comm.Get_rank(), own, blocks, size_bytes, device)

    def unmap(self) -> None:
        """Give this rank's physical memory back and keep its addresses."""
        with current_context(self._device.context, self._device.api):
            self._own.unmap()

    def map(self, comm: CommBackend) -> None:
        """Put new memory behind this rank's addresses; collective."""
        with (
            agreed_step(comm, "allocate CUDA memory"),
            current_context(self._device.context, self._device.api),
        ):
            self._own.map()

    def close(self) -> None:
        """Let go of the blocks; safe twice."""
        if self._blocks is None:
            return
        with current_context(self._device.context, self._device.api):
            self._blocks.let_go()
        self._blocks = None
