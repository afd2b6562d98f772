"""The driver and the GPUs: what is there, and whether GPUs reach each other."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashinfer_ar.doctor import nvml
from flashinfer_ar.doctor.finding import Finding, Status, grouped
from flashinfer_ar.errors import CudaError
from flashinfer_ar.jit.nvrtc import target_of_device

_DRIVER = "NVIDIA driver"
_GPUS = "GPUs"
_NO_CUDA = "allreduce of CUDA tensors cannot run here"
_LIBRARY = "libcuda.so.1"
_PCI_BUS_ID_BYTES = 32
_NAME_BYTES = 256
_REMEDIES = {
    "NO_DEVICE": "check nvidia-smi, CUDA_VISIBLE_DEVICES and the container's GPUs (--gpus all)",
    "NOT_READY": "start nvidia-fabricmanager (NVSwitch) or wait for it: nvidia-smi -q, Fabric",
    "MISMATCH": "reboot, or reload the driver: its library and kernel module differ in version",
}


@dataclass(frozen=True)
class Gpu:
    """A GPU as this process numbers it, and what its attributes promise."""

    index: int
    ordinal: Any
    name: str
    pci_bus_id: str
    uuid: str
    capability: tuple[int, int]
    posix_fd: bool
    fabric: bool
    multicast: bool

    @property
    def target(self) -> str:
        """The kernels' target; ``ValueError`` for a GPU without kernels here."""
        return target_of_device(*self.capability)


@dataclass(frozen=True)
class Driver:
    """The driver's API after ``cuInit``."""

    api: Any
    cuda_version: tuple[int, int]
    gpus: tuple[Gpu, ...]


def bindings() -> Any:
    """The module of driver calls; ``ImportError`` without cuda-python."""
    from cuda.bindings import driver

    return driver


def examine_driver() -> tuple[Driver | None, list[Finding]]:
    """The driver if it works, and the findings about it and its GPUs."""
    try:
        api = bindings()
    except ImportError as error:
        seen = f"the package cuda-bindings is missing ({error})"
        return None, [_no_driver(seen, "pip install cuda-bindings")]
    from flashinfer_ar.driver import checked  # needs cuda-python

    try:
        checked(api.cuInit, 0)
        version = int(checked(api.cuDriverGetVersion))
        gpus = tuple(_gpu(api, index) for index in range(checked(api.cuDeviceGetCount)))
    except CudaError as error:
        return None, [_no_driver(_with_gpus_on_pci(str(error)), _remedy_of(str(error)))]
    except RuntimeError as error:  # cuda-python without a libcuda.so.1 that has these calls
        return None, [_no_driver(_with_gpus_on_pci(_library_error(error)), _install())]
    driver = Driver(api, (version // 1000, version % 1000 // 10), gpus)
    return driver, [_driver(driver), _architectures(gpus)]


def _gpu(api: Any, index: int) -> Gpu:
    from flashinfer_ar.driver import checked

    ordinal = checked(api.cuDeviceGet, index)

    def attribute(name: str) -> int:
        which = getattr(api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        with contextlib.suppress(CudaError):  # a driver from before the attribute
            return int(checked(api.cuDeviceGetAttribute, which, ordinal))
        return 0

    return Gpu(
        index=index,
        ordinal=ordinal,
        name=_text(checked(api.cuDeviceGetName, _NAME_BYTES, ordinal)),
        pci_bus_id=_text(checked(api.cuDeviceGetPCIBusId, _PCI_BUS_ID_BYTES, ordinal)),
        uuid=bytes(checked(api.cuDeviceGetUuid, ordinal).bytes).hex(),
        capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        posix_fd=bool(attribute("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")),
        fabric=bool(attribute("HANDLE_TYPE_FABRIC_SUPPORTED")),
        multicast=bool(attribute("MULTICAST_SUPPORTED")),
    )


def _text(data: bytes) -> str:
    return data.split(b"\0")[0].decode()


def _no_driver(seen: str, remedy: str) -> Finding:
    return Finding(_DRIVER, Status.FAILURE, seen, _NO_CUDA, remedy)


def _with_gpus_on_pci(seen: str) -> str:
    found = nvml.gpus_on_pci()
    return f"{seen}; NVIDIA GPUs on the PCI bus: {', '.join(found) or 'none'}"


def _library_error(error: RuntimeError) -> str:
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return f"no driver library ({_LIBRARY})"
    return f"the driver library does not have what cuda-bindings calls: {error}"


def _install() -> str:
    if nvml.gpus_on_pci():
        return "install the NVIDIA driver; in a container, start it with its GPUs (--gpus all)"
    return "nothing, unless a GPU should be here: CPU tensors do not need one"


def _remedy_of(error: str) -> str:
    fallback = "look at nvidia-smi and at the kernel's log (dmesg, lines with NVRM)"
    return next((remedy for name, remedy in _REMEDIES.items() if name in error), fallback)


def _driver(driver: Driver) -> Finding:
    major, minor = driver.cuda_version
    try:
        version = nvml.driver_version()
    except nvml.NvmlMissing:
        version = "version unknown"
    return Finding(_DRIVER, Status.OK, f"{version}, for CUDA {major}.{minor}", "it answers")


def _architectures(gpus: Sequence[Gpu]) -> Finding:
    seen = grouped("GPU", {gpu.index: _described(gpu) for gpu in gpus})
    if not gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = f"none visible (CUDA_VISIBLE_DEVICES={visible!r})"
        return Finding(_GPUS, Status.FAILURE, seen, _NO_CUDA, _REMEDIES["NO_DEVICE"])
    without = [gpu for gpu in gpus if not _is_supported(gpu)]
    if without:
        meaning = "there are no kernels for a GPU that is not 9.0, 10.0 or 10.3: it is refused"
        remedy = "use H100, H200, B200, GB200, B300 or GB300, or CPU tensors"
        status = Status.FAILURE if len(without) == len(gpus) else Status.WARNING
        return Finding(_GPUS, status, seen, meaning, remedy)
    return Finding(_GPUS, Status.OK, seen, "there are kernels for them")


def _described(gpu: Gpu) -> str:
    major, minor = gpu.capability
    return f"{gpu.name}, {major}.{minor}" + (f" ({gpu.target})" if _is_supported(gpu) else "")


def _is_supported(gpu: Gpu) -> bool:
    try:
        return bool(gpu.target)
    except ValueError:
        return False


def targets(gpus: Sequence[Gpu]) -> list[str]:
    """The kernels' targets of these GPUs, each once."""
    return list(dict.fromkeys(gpu.target for gpu in gpus if _is_supported(gpu)))


def examine_p2p(driver: Driver) -> Finding:
    """Whether every GPU of this process can address every other one."""
    topic, gpus = "GPU to GPU", driver.gpus
    if len(gpus) == 1:
        seen = "one GPU is visible to this process"
        return Finding(topic, Status.OK, seen, "between processes handles decide, see below")
    pairs = list(itertools.permutations(gpus, 2))
    cut = [pair for pair in pairs if not _can_access(driver.api, *pair)]
    if cut:
        meaning = "ranks on these GPUs cannot store to each other: workspaces on them fail"
        remedy = "look at nvidia-smi topo -p2p w; IOMMU and PCIe ACS block it, NVLink may be down"
        return Finding(topic, Status.FAILURE, f"no access: {_arrows(cut)}", meaning, remedy)
    slow = [pair for pair in pairs if not _has_atomics(driver.api, *pair)]
    if slow:
        seen = f"access without native atomics, so hardly NVLink: {_arrows(slow)}"
        meaning = "allreduce works and is slower than over NVLink"
        return Finding(topic, Status.WARNING, seen, meaning, "look at nvidia-smi topo -m")
    seen = f"all {len(pairs)} pairs have access, with native atomics as over NVLink"
    return Finding(topic, Status.OK, seen, "ranks store straight to each other's memory")


def _can_access(api: Any, gpu: Gpu, peer: Gpu) -> bool:
    from flashinfer_ar.driver import checked

    return bool(checked(api.cuDeviceCanAccessPeer, gpu.ordinal, peer.ordinal))


def _has_atomics(api: Any, gpu: Gpu, peer: Gpu) -> bool:
    from flashinfer_ar.driver import checked

    which = api.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    return bool(checked(api.cuDeviceGetP2PAttribute, which, gpu.ordinal, peer.ordinal))


def _arrows(pairs: Sequence[tuple[Gpu, Gpu]]) -> str:
    shown = ", ".join(f"{gpu.index} -> {peer.index}" for gpu, peer in pairs[:8])
    return shown + (f" and {len(pairs) - 8} more" if len(pairs) > 8 else "")
