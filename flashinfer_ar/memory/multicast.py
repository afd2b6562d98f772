"""One address whose stores reach every rank: a multicast object over the ranks' blocks."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from flashinfer_ar import env
from flashinfer_ar.bootstrap import CommBackend, agreed_step
from flashinfer_ar.driver import checked
from flashinfer_ar.errors import CudaError
from flashinfer_ar.memory.cuda_device import CudaDevice, access_of, round_up
from flashinfer_ar.memory.fd_exchange import exchange_fds


def is_wanted(comm: CommBackend, device: CudaDevice) -> bool:
    """Whether every rank's device has multicast and no switch turns it off; collective."""
    api = device.api
    with agreed_step(comm, "ask for multicast support"), device.current():
        attribute = api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
        supported = bool(checked(api.cuDeviceGetAttribute, attribute, device.ordinal))
    return all(comm.allgather(supported and env.multicast_switched_off_by() is None))


class Multicast:
    """An address of this rank for all ranks' blocks. Rank 0 makes the object, the others import it.

    Every method that is collective raises ``SymmetricMemoryError`` on all ranks if a step fails on
    one of them, and takes back what it did.
    """

    def __init__(
        self, device: CudaDevice, handle_type: Any, size_bytes: int, num_ranks: int
    ) -> None:
        self._device = device
        self._handle_type = handle_type
        unit = _unit(device, _properties(device, handle_type, size_bytes, num_ranks))
        self.size_bytes = round_up(size_bytes, unit)
        self._properties = _properties(device, handle_type, self.size_bytes, num_ranks)
        reserve = device.api.cuMemAddressReserve
        self.address = int(checked(reserve, self.size_bytes, unit, 0, 0))
        self._attached = contextlib.ExitStack()

    def attach(self, comm: CommBackend, own_block: Any) -> None:
        """Bind all ranks' blocks (``own_block`` is this rank's handle) and map; collective."""
        made = contextlib.ExitStack()
        try:
            self._attach(comm, own_block, made)
        except Exception:
            # The error that made it necessary is the one to report.
            with contextlib.suppress(CudaError), self._device.current():
                made.close()
            raise
        self._attached = made

    def _attach(self, comm: CommBackend, own_block: Any, made: contextlib.ExitStack) -> None:
        api, size = self._device.api, self.size_bytes
        handle = self._shared_object(comm, made)
        with agreed_step(comm, "add the device to the multicast object"), self._device.current():
            checked(api.cuMulticastAddDevice, handle, self._device.ordinal)
        # A block can be bound only when all devices have been added: that was the vote.
        with agreed_step(comm, "bind memory to the multicast object"), self._device.current():
            checked(api.cuMulticastBindMem, handle, 0, own_block, 0, size, 0)
            made.callback(checked, api.cuMulticastUnbind, handle, self._device.ordinal, 0, size)
        with agreed_step(comm, "map the multicast object"), self._device.current():
            checked(api.cuMemMap, self.address, size, 0, handle, 0)
            made.callback(checked, api.cuMemUnmap, self.address, size)
            checked(api.cuMemSetAccess, self.address, size, [access_of(self._device)], 1)

    def detach(self) -> None:
        """Unmap, unbind and let go of the object; the address stays. Safe twice.

        For when all ranks' calls have ended: a store through the object would miss this rank.
        """
        with self._device.current():
            self._attached.close()

    def close(self) -> None:
        """Give up the object, as ``detach`` does, and the address."""
        with self._device.current(), contextlib.ExitStack() as calls:
            free = self._device.api.cuMemAddressFree
            calls.callback(checked, free, self.address, self.size_bytes)
            calls.callback(self._attached.close)

    def _shared_object(self, comm: CommBackend, made: contextlib.ExitStack) -> Any:
        """Rank 0's object as this rank's handle, released by ``made``."""
        api, is_root = self._device.api, comm.Get_rank() == 0
        is_fabric = self._handle_type == api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
        with contextlib.ExitStack() as fds:
            with agreed_step(comm, "create the multicast object"), self._device.current():
                handle: Any = None
                exported: Any = None
                if is_root:
                    handle = checked(api.cuMulticastCreate, self._properties)
                    made.callback(checked, api.cuMemRelease, handle)
                    exported = checked(
                        api.cuMemExportToShareableHandle, handle, self._handle_type, 0
                    )
                if not is_fabric:
                    # Rank 0 alone has something to give; the others exchange nothing for it.
                    exported = int(exported) if is_root else os.open(os.devnull, os.O_RDONLY)
                    fds.callback(os.close, exported)
            if is_fabric:
                shared: Any = comm.bcast(bytes(exported.data) if is_root else None, 0)
            else:
                received = exchange_fds(comm, exported)
                for fd in received:
                    fds.callback(os.close, fd)
                shared = received[0]
            with agreed_step(comm, "import the multicast object"), self._device.current():
                if not is_root:
                    handle = checked(api.cuMemImportFromShareableHandle, shared, self._handle_type)
                    made.callback(checked, api.cuMemRelease, handle)
        return handle


def _unit(device: CudaDevice, properties: Any) -> int:
    # Not the recommended one, which may be far larger than a ring.
    option = device.api.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM
    return int(checked(device.api.cuMulticastGetGranularity, properties, option))


def _properties(device: CudaDevice, handle_type: Any, size_bytes: int, num_ranks: int) -> Any:
    properties = device.api.CUmulticastObjectProp()
    properties.numDevices = num_ranks
    properties.size = size_bytes
    properties.handleTypes = int(handle_type)
    return properties
