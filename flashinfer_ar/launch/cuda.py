"""The CUDA substrate: kernels as cubins, launched on torch's current stream."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from flashinfer_ar.bootstrap import CommBackend, InProcessBackend, agreed_step
from flashinfer_ar.driver import checked, current_context, primary_context
from flashinfer_ar.errors import CudaError
from flashinfer_ar.jit import KernelSpec
from flashinfer_ar.jit.nvrtc import target_of_device
from flashinfer_ar.jit.params import Control, Params, TimeoutRecord
from flashinfer_ar.launch.streams import StreamOrder
from flashinfer_ar.memory import SymmetricMemory
from flashinfer_ar.memory.cuda_device import CudaDevice
from flashinfer_ar.memory.cuda_local import CudaLocalMemory
from flashinfer_ar.memory.cuda_shared import CudaSharedMemory
from flashinfer_ar.memory.device_place import place_of

_SUCCESS = driver.CUresult.CUDA_SUCCESS


@functools.cache
def _load_function(cubin: Path, name: str, device_index: int) -> Any:
    """The function in a module that stays loaded, for all workspaces of the process."""
    del device_index  # its context is current; a key of the cache
    module = checked(driver.cuModuleLoadData, cubin.read_bytes())
    return checked(driver.cuModuleGetFunction, module, name.encode())


class CudaLaunch:
    """A kernel with its grid and parameter block, for one workspace.

    ``start`` is on every call's path: it sets nothing that the launch before has set already.
    """

    ends_at_once = False

    def __init__(
        self, kernel: CudaKernel, params: Params, num_ctas: int, may_start_early: bool
    ) -> None:
        self.function = kernel.function
        self.configs = (
            kernel.config(num_ctas),
            kernel.config(num_ctas, launch_with_pdl=may_start_early),
        )
        # One argument: an array of one pointer, to the parameter block, which the driver copies.
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self.arguments = ctypes.addressof(self._arguments)
        self._current_stream = functools.partial(
            torch._C._cuda_getCurrentRawStream, kernel.device_index
        )
        self._context = kernel.context
        self._order = kernel.order
        # By `launch_with_pdl`: the stream in the configuration, and the launch.
        enqueue = driver.cuLaunchKernelEx
        self._launches: list[tuple[int, Callable[[], tuple[Any]]]] = [
            (0, functools.partial(enqueue, config, self.function, self.arguments, 0))
            for config in self.configs
        ]

    def start(self, launch_with_pdl: bool) -> None:
        """Enqueue the kernel on torch's current stream of the device."""
        stream = self._current_stream()
        same, launch = self._launches[launch_with_pdl]
        if stream == same and stream == self._order.settled and launch()[0] == _SUCCESS:
            return
        self._start_anew(stream, launch_with_pdl)

    def _start_anew(self, stream: int, launch_with_pdl: bool) -> None:
        """On another stream than before, or where the launch failed.

        It fails in a thread in which another device's context is current, or none. To ask for the
        context each time would cost every call as much as its own checks.
        """
        with current_context(self._context):
            self._order.enter(stream)
            config, (_, launch) = self.configs[launch_with_pdl], self._launches[launch_with_pdl]
            config.hStream = stream
            self._launches[launch_with_pdl] = stream, launch
            checked(driver.cuLaunchKernelEx, config, self.function, self.arguments, 0)


class CudaKernel:
    """A kernel in a device's memory."""

    def __init__(
        self,
        spec: KernelSpec,
        binary: Path,
        device_index: int,
        context: Any,
        order: StreamOrder,
    ) -> None:
        self.device_index = device_index
        self.context = context
        self.order = order
        self.function = _load_function(binary, spec.name, device_index)
        self._spec = spec
        self._cluster = spec.geometry.cluster

    def config(self, num_ctas: int, *, launch_with_pdl: bool = False) -> Any:
        """The driver's description of a launch, on the default stream."""
        config = driver.CUlaunchConfig()
        config.gridDimX = num_ctas
        config.blockDimX = self._spec.geometry.threads
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.sharedMemBytes = self._spec.shared_bytes
        attributes = [cluster_attribute(self._cluster)] if self._cluster > 1 else []
        config.attrs = [*attributes, pdl_attribute()] if launch_with_pdl else attributes
        config.numAttrs = len(config.attrs)
        return config

    def prepare(self, params: Params, num_ctas: int, may_start_early: bool) -> CudaLaunch:
        return CudaLaunch(self, params, num_ctas, may_start_early)

    def max_resident_clusters(self) -> int:
        """As the driver computes it, for a device with nothing else on it."""
        config = self.config(self._cluster)
        with current_context(self.context):
            if self._cluster > 1:
                return int(checked(driver.cuOccupancyMaxActiveClusters, self.function, config))
            device = checked(driver.cuCtxGetDevice)
            per_sm = checked(
                driver.cuOccupancyMaxActiveBlocksPerMultiprocessor,
                self.function,
                config.blockDimX,
                config.sharedMemBytes,
            )
            attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
            return int(per_sm) * int(checked(driver.cuDeviceGetAttribute, attribute, device))


class CudaSubstrate:
    """One rank on one GPU; its ring is memory of that GPU, outside torch's pools."""

    compiles_rank = True

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        if torch.cuda.is_current_stream_capturing():
            raise CudaError(
                "a CUDA graph is being captured: a workspace allocates and synchronizes, so make "
                "it before the capture"
            )
        self._order = StreamOrder()
        self._device = device
        self._context = primary_context(device.index)
        self.target = target_of_device(*torch.cuda.get_device_capability(device))
        self.device_identity = str(torch.cuda.get_device_properties(device).uuid)
        with contextlib.ExitStack() as undo, current_context(self._context):
            self.control = int(checked(driver.cuMemAlloc, ctypes.sizeof(Control)))
            undo.callback(checked, driver.cuMemFree, self.control)
            checked(driver.cuMemsetD8, self.control, 0, ctypes.sizeof(Control))
            # Pinned: a kernel writes it, the CPU reads it without a copy.
            size, flags = ctypes.sizeof(TimeoutRecord), driver.CU_MEMHOSTALLOC_PORTABLE
            self._record_address = int(checked(driver.cuMemHostAlloc, size, flags))
            undo.pop_all()
        ctypes.memset(self._record_address, 0, size)
        self.timeout_record = TimeoutRecord.from_address(self._record_address)

    def allocate(self, comm: CommBackend, size_bytes: int) -> SymmetricMemory:
        with agreed_step(comm, "find out where the device is"):
            place = place_of(self._device.index)
        device = CudaDevice(driver, self._device.index, self._context, place)
        if isinstance(comm, InProcessBackend):
            return CudaLocalMemory.allocate(comm, size_bytes, device)
        return CudaSharedMemory.allocate(comm, size_bytes, device)

    def fill(self, address: int, size_bytes: int, word: int) -> None:
        with current_context(self._context):
            checked(driver.cuMemsetD32, address, word, size_bytes // 4)
            checked(driver.cuCtxSynchronize)

    def load(self, spec: KernelSpec, binary: Path) -> CudaKernel:
        with current_context(self._context):
            return CudaKernel(spec, binary, self._device.index, self._context, self._order)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        if not self.control:
            return
        with current_context(self._context):
            self._order.close()
            checked(driver.cuMemFree, self.control)
            checked(driver.cuMemFreeHost, self._record_address)
        self.control = 0


def cluster_attribute(cluster: int) -> Any:
    """For ``CUlaunchConfig``: CTAs in clusters of so many."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x = cluster
    attribute.value.clusterDim.y = 1
    attribute.value.clusterDim.z = 1
    return attribute


def pdl_attribute() -> Any:
    """For ``CUlaunchConfig``: the launch may start before the grid before it has ended."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute
