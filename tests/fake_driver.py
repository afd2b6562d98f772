"""A stand-in for the calls of ``cuda.bindings.driver`` that share memory between ranks.

Every rank has a :class:`FakeDriver`; those of one test share a folder in ``/dev/shm``, the machine
room. An allocation is a file there and mapped memory is real, in threads and in processes, so the
host build of the kernels runs on it. Structs and enums are the real ones. Misuse answers an error
as the driver would, and fails ``check_balanced`` too, whatever the product made of the error.
"""

from __future__ import annotations

import os
import threading

from cuda.bindings import driver
from fake_machine import (
    FABRIC,
    FD,
    GRANULARITY,
    MULTICAST_GRANULARITY,
    Code,
    FakeMachine,
    Refused,
    allow,
    driver_call,
    forget,
    map_file,
    map_nothing,
    reserve,
)


class FakeDriver(FakeMachine):
    """The driver as one rank sees it."""

    # ---- Contexts and attributes ------------------------------------------------------------

    @driver_call()
    def cuCtxPushCurrent(self, context):
        self._require(context == self.context, "a context of another device")
        self._contexts.append((threading.get_ident(), context))

    @driver_call(even_if_it_fails=True)
    def cuCtxPopCurrent(self):
        self._require(bool(self._contexts), "pop of an empty stack of contexts")
        thread, context = self._contexts.pop()
        self._require(thread == threading.get_ident(), "pop of another thread's context")
        return context

    @driver_call()
    def cuDeviceGetAttribute(self, attribute, device):
        self._require_device(device)
        return self.attributes[attribute]

    # ---- Allocations ------------------------------------------------------------------------

    @driver_call()
    def cuMemGetAllocationGranularity(self, properties, option):
        self._require_device(properties.location.id)
        return GRANULARITY

    @driver_call()
    def cuMemCreate(self, size, properties, flags):
        self._require_context()
        self._require_device(properties.location.id)
        self._require(flags == 0 and size > 0 and size % GRANULARITY == 0, f"size {size}")
        handle_type = int(properties.requestedHandleTypes)
        if handle_type & FABRIC and self.cluster is None:
            raise Refused(Code.CUDA_ERROR_NOT_PERMITTED)
        return self._create("mem", size, handle_type)

    @driver_call(even_if_it_fails=True)
    def cuMemRelease(self, handle):
        held = self._object(handle)
        self._require(not held.bound, "release of a multicast object with memory bound to it")
        del self._objects[int(handle)]
        os.close(held.fd)
        if held.owned:
            held.path.unlink()

    @driver_call()
    def cuMemExportToShareableHandle(self, handle, handle_type, flags):
        held = self._object(handle)
        self._require(bool(held.handle_type & handle_type), f"export as {handle_type.name}")
        if handle_type == FD:
            # O_CLOEXEC is what os.open sets; the caller owns the descriptor.
            return os.open(f"/proc/self/fd/{held.fd}", os.O_RDWR)
        fabric = driver.CUmemFabricHandle()
        fabric.data = f"{self.cluster}/{held.path.name}".encode().ljust(64, b"\0")
        return fabric

    @driver_call()
    def cuMemImportFromShareableHandle(self, shared, handle_type):
        if handle_type == FD:
            return self._import_fd(shared)
        # The binding takes the 64 bytes, not the struct that the export returned.
        if not isinstance(shared, bytes):
            raise TypeError(
                f"{type(shared)}, but expected None, int or object with buffer protocol"
            )
        cluster, name = shared.rstrip(b"\0").decode().split("/")
        if cluster != self.cluster:
            raise Refused(Code.CUDA_ERROR_NOT_PERMITTED)
        return self._open(self.world / name)

    # ---- Addresses --------------------------------------------------------------------------

    @driver_call()
    def cuMemAddressReserve(self, size, alignment, address, flags):
        self._require_context()
        self._require(size > 0 and size % GRANULARITY == 0, f"reservation of {size} bytes")
        base = reserve(size, alignment or GRANULARITY)
        self._reserved[base] = size
        return driver.CUdeviceptr(base)

    @driver_call(even_if_it_fails=True)
    def cuMemAddressFree(self, address, size):
        base = int(address)
        self._require(self._reserved.get(base) == size, "free of what is not reserved")
        inside = [each for each in self.mapped if base <= each < base + size]
        self._require(not inside, "free of a mapped range")
        del self._reserved[base]
        forget(base, size)

    @driver_call()
    def cuMemMap(self, address, size, offset, handle, flags):
        self._require_context()
        base, held = int(address), self._object(handle)
        self._require(
            any(at <= base and base + size <= at + held for at, held in self._reserved.items()),
            "map outside a reservation",
        )
        overlap = [
            at for at, other in self.mapped.items() if at < base + size and base < at + other
        ]
        self._require(not overlap, "map over a mapping")
        self._require(
            offset + size <= held.size and size % GRANULARITY == 0, f"map of {size} bytes"
        )
        map_file(base, size, held.fd, offset)
        self.mapped[base] = size
        self.is_own[base] = held.owned

    @driver_call(even_if_it_fails=True)
    def cuMemUnmap(self, address, size):
        base = int(address)
        self._require(self.mapped.get(base) == size, "unmap of what is not mapped")
        del self.mapped[base], self.is_own[base]
        map_nothing(base, size)

    @driver_call()
    def cuMemSetAccess(self, address, size, descriptors, count):
        base = int(address)
        self._require(count == len(descriptors) == 1, "access of one device is what is needed")
        self._require_device(descriptors[0].location.id)
        self._require(self.mapped.get(base) == size, "access to what is not mapped")
        allow(base, size)

    # ---- Multicast: the bookkeeping only; a store reaches one file, not the bound blocks -----

    @driver_call()
    def cuMulticastGetGranularity(self, properties, option):
        return MULTICAST_GRANULARITY[int(option)]

    @driver_call()
    def cuMulticastCreate(self, properties):
        self._require_context()
        self._require_multicast()
        self._require(
            properties.size > 0 and properties.size % MULTICAST_GRANULARITY[0] == 0,
            f"multicast object of {properties.size} bytes",
        )
        handle_type = int(properties.handleTypes)
        if handle_type & FABRIC and self.cluster is None:
            raise Refused(Code.CUDA_ERROR_NOT_PERMITTED)
        devices = int(properties.numDevices)
        return self._create("multicast", properties.size, handle_type, f"-{devices}")

    @driver_call()
    def cuMulticastAddDevice(self, multicast, device):
        self._require_device(device)
        self._require_multicast()
        held = self._multicast(multicast)
        place = f"{self.host}-{device}"
        added = self._added(held)
        self._require(place not in added, "a device that was added already")
        self._require(len(added) < held.num_devices, "one device too many")
        self._place_file(held, place).touch(exist_ok=False)

    @driver_call()
    def cuMulticastBindMem(self, multicast, offset, memory, memory_offset, size, flags):
        held, block = self._multicast(multicast), self._object(memory)
        self._require(
            len(self._added(held)) == held.num_devices, "bind before every device was added"
        )
        unit = MULTICAST_GRANULARITY[0]
        self._require(size % unit == offset % unit == memory_offset % unit == 0, f"bind of {size}")
        self._require(memory_offset + size <= block.size, "bind past the end of the memory")
        self._require(offset + size <= held.size and offset not in held.bound, "bind")
        held.bound.add(offset)

    @driver_call(even_if_it_fails=True)
    def cuMulticastUnbind(self, multicast, device, offset, size):
        self._require_device(device)
        held = self._multicast(multicast)
        self._require(offset in held.bound, "unbind of what is not bound")
        held.bound.remove(offset)
