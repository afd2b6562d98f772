"""A rank's device, and memory on it that other processes can map."""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flashinfer_ar.driver import checked, current_context
from flashinfer_ar.errors import CudaError
from flashinfer_ar.memory.topology import DevicePlace


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

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make its context current for driver calls; ``CudaError`` then names the device."""
        try:
            with current_context(self.context, self.api):
                yield
        except CudaError as error:
            raise CudaError(f"device {self.place.pci_bus_id}: {error}") from error


def try_handle(device: CudaDevice, kind: HandleKind) -> str | None:
    """Allocate and export as little as possible; the error text if that fails."""
    api = device.api
    try:
        with device.current(), contextlib.ExitStack() as stack:
            properties = properties_of(device, kind)
            size = granularity_of(device, properties)
            handle = checked(api.cuMemCreate, size, properties, 0)
            stack.callback(checked, api.cuMemRelease, handle)
            exported = checked(
                api.cuMemExportToShareableHandle, handle, handle_type_of(api, kind), 0
            )
            if kind is HandleKind.POSIX_FD:
                stack.callback(os.close, int(exported))
    except Exception as error:  # the answer is a vote: whatever it is, the peers must hear it
        return f"{type(error).__name__}: {error}"
    return None


def properties_of(device: CudaDevice, kind: HandleKind) -> Any:
    """The driver's description of memory on a device that can be shared that way."""
    api = device.api
    properties = api.CUmemAllocationProp()
    properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = int(device.ordinal)
    properties.requestedHandleTypes = handle_type_of(api, kind)
    return properties


def handle_type_of(api: Any, kind: HandleKind) -> Any:
    """The driver's name of a kind."""
    types = api.CUmemAllocationHandleType
    if kind is HandleKind.POSIX_FD:
        return types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return types.CU_MEM_HANDLE_TYPE_FABRIC


def granularity_of(device: CudaDevice, properties: Any) -> int:
    """The unit of such memory, in bytes."""
    api = device.api
    option = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    return int(checked(api.cuMemGetAllocationGranularity, properties, option))


def access_of(device: CudaDevice) -> Any:
    """Reading and writing by a device, as the driver wants it said."""
    api = device.api
    access = api.CUmemAccessDesc()
    access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = int(device.ordinal)
    access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def round_up(size: int, unit: int) -> int:
    """``size`` rounded up to whole units."""
    return -(-size // unit) * unit
