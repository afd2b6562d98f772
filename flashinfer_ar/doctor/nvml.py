"""What NVML knows and CUDA does not: the driver's version and the NVLink fabric's state."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_ar.memory.topology import FabricPlace

_STATES = ("not supported", "not started", "in progress", "completed")


class NvmlMissing(RuntimeError):
    """NVML cannot be asked: the text says why."""


@dataclass(frozen=True)
class Fabric:
    """A GPU in its NVLink fabric; ``place`` only where the fabric joins hosts and is up."""

    state: str
    place: FabricPlace | None

    def __str__(self) -> str:
        if self.place is None:
            return f"state {self.state}, no cluster"
        return (
            f"state {self.state}, cluster {self.place.cluster_uuid}, clique {self.place.clique_id}"
        )


def driver_version() -> str:
    """Such as ``580.159.04``; :class:`NvmlMissing` where NVML does not answer."""
    with _session() as pynvml:
        version = pynvml.nvmlSystemGetDriverVersion()
    return version.decode() if isinstance(version, bytes) else str(version)


def fabric_of(pci_bus_id: str) -> Fabric:
    """The fabric as this GPU sees it; :class:`NvmlMissing` where NVML does not answer."""
    with _session() as pynvml:
        info = pynvml.c_nvmlGpuFabricInfoV_t()
        info.version = pynvml.nvmlGpuFabricInfo_v2
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
        try:
            pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        except pynvml.NVMLError_NotSupported:
            return Fabric(_STATES[0], None)
        state, cluster = int(info.state), bytes(info.clusterUuid)
        up = state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED and any(cluster)
        place = FabricPlace(cluster.hex(), int(info.cliqueId)) if up else None
        return Fabric(_STATES[state] if state < len(_STATES) else str(state), place)


@contextlib.contextmanager
def _session() -> Iterator[Any]:
    try:
        import pynvml
    except ImportError as error:
        raise NvmlMissing(f"the package nvidia-ml-py is missing ({error})") from error
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise NvmlMissing(f"NVML: {error}") from error


def gpus_on_pci(devices: Path = Path("/sys/bus/pci/devices")) -> list[str]:
    """Bus ids of the NVIDIA display and 3D controllers, with or without a driver."""
    found = []
    for device in devices.glob("*"):
        with contextlib.suppress(OSError):
            vendor = (device / "vendor").read_text().strip()
            if vendor == "0x10de" and (device / "class").read_text().startswith("0x03"):
                found.append(device.name)
    return sorted(found)
