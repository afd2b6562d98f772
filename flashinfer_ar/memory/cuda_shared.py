"""Symmetric memory between GPUs of several processes: one path for POSIX fd and fabric handles.

create -> export -> exchange -> import -> map, with a vote after each step: all ranks go on, or all
raise one error and take back what they made. On one host handles travel as file descriptors; across
hosts, inside one NVLink domain, as fabric handles.
"""

from __future__ import annotations

import contextlib
import enum
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashinfer_ar.bootstrap import CommBackend, agreed_step
from flashinfer_ar.driver import checked, current_context
from flashinfer_ar.errors import CudaError, SymmetricMemoryError
from flashinfer_ar.memory.fd_exchange import exchange_fds
from flashinfer_ar.memory.topology import DevicePlace, exchange_places

# Not ready is what a fabric manager or an IMEX daemon answers while it starts; it passes.
_NUM_TRIES = 10
_PAUSE_S = 0.5


class HandleKind(str, enum.Enum):
    """How an allocation travels to another process."""

    POSIX_FD = "POSIX file descriptors"
    FABRIC = "fabric handles"


@dataclass(frozen=True)
class CudaDevice:
    """A rank's device."""

    api: Any  # cuda.bindings.driver, or a stand-in
    ordinal: int
    context: Any
    place: DevicePlace


class CudaSharedMemory:
    """One block on every rank's GPU, mapped by all ranks side by side in one range of addresses.

    ``close`` waits for nobody: a block's physical memory lives until no rank maps it any more.
    """

    multicast = None

    def __init__(
        self, rank: int, num_ranks: int, size_bytes: int, device: CudaDevice, kind: HandleKind
    ) -> None:
        self.size_bytes = size_bytes
        self._rank = rank
        self._device = device
        self._properties = _properties(device, kind)
        self._kind = kind
        self._block_bytes = _round_up(size_bytes, _granularity(device, self._properties))
        self._range_bytes = num_ranks * self._block_bytes
        self._base = int(checked(device.api.cuMemAddressReserve, self._range_bytes, 0, 0, 0))
        self._is_mapped = False

    @classmethod
    def allocate(cls, comm: CommBackend, size_bytes: int, device: CudaDevice) -> CudaSharedMemory:
        """``size_bytes`` on every rank's device; collective.

        Raises ``SymmetricMemoryError`` on all ranks, with nothing left behind, if the ranks cannot
        share memory or a driver call fails on one of them; the text names rank, host, call, code.
        """
        places = exchange_places(comm, device.place)
        kind = _agree_on_kind(comm, device, places)
        with contextlib.ExitStack() as undo, current_context(device.context, device.api):
            with agreed_step(comm, "reserve addresses"):
                memory = cls(comm.Get_rank(), comm.Get_size(), size_bytes, device, kind)
                undo.callback(memory.close)
            memory.map(comm)
            undo.pop_all()
        return memory

    @property
    def local(self) -> int:
        """The address of this rank's block."""
        return self.peers[self._rank]

    @property
    def peers(self) -> tuple[int, ...]:
        """The addresses of all ranks' blocks."""
        return tuple(range(self._base, self._base + self._range_bytes, self._block_bytes))

    def map(self, comm: CommBackend) -> None:
        """Give every block physical memory, shared by all ranks; collective.

        Handles are needed on the way only: a mapping keeps its memory.
        """
        api = self._device.api
        with contextlib.ExitStack() as handles, contextlib.ExitStack() as undo:
            with agreed_step(comm, f"create CUDA memory to be shared by {self._kind.value}"):
                own = checked(api.cuMemCreate, self._block_bytes, self._properties, 0)
                handles.callback(checked, api.cuMemRelease, own)
            imported = self._exchange(comm, own, handles)
            with agreed_step(comm, "map the CUDA memory of all ranks"):
                for address, handle in zip(self.peers, imported, strict=True):
                    checked(api.cuMemMap, address, self._block_bytes, 0, handle, 0)
                    undo.callback(checked, api.cuMemUnmap, address, self._block_bytes)
                self._allow_access()
            undo.pop_all()
        self._is_mapped = True

    def unmap(self) -> None:
        """Let go of the physical memory and keep the addresses; safe twice."""
        if not self._is_mapped:
            return
        self._is_mapped = False
        for address in self.peers:
            checked(self._device.api.cuMemUnmap, address, self._block_bytes)

    def close(self) -> None:
        """Let go of memory and addresses; safe twice."""
        if not self._base:
            return
        with current_context(self._device.context, self._device.api):
            self.unmap()
            checked(self._device.api.cuMemAddressFree, self._base, self._range_bytes)
        self._base = 0

    def _exchange(self, comm: CommBackend, own: Any, handles: contextlib.ExitStack) -> list[Any]:
        """All ranks' handles, the own one in its place; they are released with ``handles``."""
        api, kind_code = self._device.api, _handle_type(self._device.api, self._kind)
        with contextlib.ExitStack() as fds_to_close:
            with agreed_step(comm, f"export CUDA memory for {self._kind.value}"):
                exported = checked(api.cuMemExportToShareableHandle, own, kind_code, 0)
                if self._kind is HandleKind.POSIX_FD:
                    fds_to_close.callback(os.close, int(exported))
            if self._kind is HandleKind.POSIX_FD:
                shared: Sequence[Any] = exchange_fds(comm, int(exported))
                for fd in shared:
                    fds_to_close.callback(os.close, fd)
            else:
                shared = [_fabric_handle(api, data) for data in comm.allgather(exported.data)]
            with agreed_step(comm, f"import CUDA memory by {self._kind.value}"):
                imported = []
                for peer, handle in enumerate(shared):
                    if peer == self._rank:
                        imported.append(own)
                        continue
                    imported.append(checked(api.cuMemImportFromShareableHandle, handle, kind_code))
                    handles.callback(checked, api.cuMemRelease, imported[-1])
        return imported

    def _allow_access(self) -> None:
        api = self._device.api
        access = api.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for address in self.peers:
            checked(api.cuMemSetAccess, address, self._block_bytes, [access], 1)


def _agree_on_kind(
    comm: CommBackend, device: CudaDevice, places: Sequence[DevicePlace]
) -> HandleKind:
    """The first kind that works on every rank, found by trying: attributes promise too much.

    An H200 in a container reports fabric support and answers NOT_PERMITTED to an allocation.
    """
    one_host = len({place.host for place in places}) == 1
    kinds = (HandleKind.POSIX_FD, HandleKind.FABRIC) if one_host else (HandleKind.FABRIC,)
    refusals = []
    for kind in kinds:
        answers = _try_on_all(comm, device, kind)
        if all(answer is None for answer in answers):
            return kind
        refusals += [
            f"{kind.value}: rank {rank} on host {places[rank].host.hostname}, "
            f"device {places[rank].pci_bus_id}: {answer}"
            for rank, answer in enumerate(answers)
            if answer is not None
        ]
        if any("OUT_OF_MEMORY" in answer for answer in answers if answer):
            break  # another kind of handle needs the same memory
    hint = "" if one_host else (
        ". Between hosts memory is shared by fabric handles alone, which need an NVLink fabric "
        "and an IMEX channel (/dev/nvidia-caps-imex-channels)"
    )  # fmt: skip
    raise SymmetricMemoryError("CUDA memory cannot be shared: " + "; ".join(refusals) + hint)


def _try_on_all(comm: CommBackend, device: CudaDevice, kind: HandleKind) -> list[str | None]:
    """Each rank's error text, ``None`` where it works. Only "not ready" is tried again, by all."""
    for _ in range(_NUM_TRIES):
        answers: list[str | None] = comm.allgather(_try(device, kind))
        if not any("SYSTEM_NOT_READY" in answer for answer in answers if answer):
            break
        time.sleep(_PAUSE_S)
    return answers


def _try(device: CudaDevice, kind: HandleKind) -> str | None:
    """Allocate and export as little as possible; the error text if that fails."""
    api = device.api
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(current_context(device.context, api))
            properties = _properties(device, kind)
            size = _granularity(device, properties)
            handle = checked(api.cuMemCreate, size, properties, 0)
            stack.callback(checked, api.cuMemRelease, handle)
            exported = checked(api.cuMemExportToShareableHandle, handle, _handle_type(api, kind), 0)
            if kind is HandleKind.POSIX_FD:
                os.close(int(exported))
    except CudaError as error:
        return str(error)
    return None


def _properties(device: CudaDevice, kind: HandleKind) -> Any:
    api = device.api
    properties = api.CUmemAllocationProp()
    properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = int(device.ordinal)
    properties.requestedHandleTypes = _handle_type(api, kind)
    return properties


def _handle_type(api: Any, kind: HandleKind) -> Any:
    types = api.CUmemAllocationHandleType
    if kind is HandleKind.POSIX_FD:
        return types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return types.CU_MEM_HANDLE_TYPE_FABRIC


def _fabric_handle(api: Any, data: bytes) -> Any:
    handle = api.CUmemFabricHandle()
    handle.data = data
    return handle


def _granularity(device: CudaDevice, properties: Any) -> int:
    api = device.api
    option = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    return int(checked(api.cuMemGetAllocationGranularity, properties, option))


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
