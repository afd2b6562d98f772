"""Asks the driver and NVML where a device is."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from cuda.bindings import driver

from flashinfer_ar.bootstrap import host_identity
from flashinfer_ar.driver import checked
from flashinfer_ar.memory.topology import DevicePlace, FabricPlace

_PCI_BUS_ID_BYTES = 32


def place_of(device_index: int) -> DevicePlace:
    """The place of the device that this process calls ``device_index``.

    NVML counts devices otherwise (all of the machine, whatever CUDA_VISIBLE_DEVICES says), so it is
    asked by PCI bus id.
    """
    ordinal = checked(driver.cuDeviceGet, device_index)
    bus_id = checked(driver.cuDeviceGetPCIBusId, _PCI_BUS_ID_BYTES, ordinal)
    bus_id = bus_id.split(b"\0")[0].decode()
    uuid = bytes(checked(driver.cuDeviceGetUuid, ordinal).bytes).hex()
    return DevicePlace(host_identity(), bus_id, uuid, fabric_of(bus_id))


def fabric_of(pci_bus_id: str) -> FabricPlace | None:
    """The device's place in an NVLink fabric that is up; ``None`` without one, or without NVML."""
    try:
        import pynvml
    except ImportError:
        return None
    with contextlib.suppress(pynvml.NVMLError), _nvml(pynvml):
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
        info = pynvml.c_nvmlGpuFabricInfoV_t()
        info.version = pynvml.nvmlGpuFabricInfo_v2
        pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        cluster = bytes(info.clusterUuid)
        if info.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED and any(cluster):
            return FabricPlace(cluster.hex(), int(info.cliqueId))
    return None


@contextlib.contextmanager
def _nvml(pynvml: object) -> Iterator[None]:
    pynvml.nvmlInit()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        pynvml.nvmlShutdown()  # type: ignore[attr-defined]
