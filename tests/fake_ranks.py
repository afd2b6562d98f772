"""Ranks on made-up hosts and GPUs: each with its fake driver, threads or processes alike."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fake_driver import FakeDriver

from flashinfer_ar.bootstrap import CommBackend, HostIdentity
from flashinfer_ar.launch import HostSubstrate
from flashinfer_ar.memory import SymmetricMemory
from flashinfer_ar.memory.cuda_device import CudaDevice
from flashinfer_ar.memory.cuda_shared import CudaSharedMemory
from flashinfer_ar.memory.topology import DevicePlace, FabricPlace

RACK = FabricPlace("rack", 0)


@contextlib.contextmanager
def machine_room() -> Iterator[Path]:
    """The folder of a test's fake drivers."""
    folder = tempfile.mkdtemp(dir="/dev/shm", prefix="far-fake-")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder)


def device_of(
    driver: FakeDriver, host: HostIdentity, fabric: FabricPlace | None = RACK
) -> CudaDevice:
    bus_id = f"0000:{driver.device + 1:02x}:00.0"
    uuid = f"GPU-{host.hostname}-{driver.device}"
    return CudaDevice(
        driver, driver.device, driver.context, DevicePlace(host, bus_id, uuid, fabric)
    )


class FakeRanks:
    """``hosts`` has a letter a rank: its host. Devices count from 0 on each host."""

    def __init__(self, world: Path, hosts: str, fabric: FabricPlace | None = RACK) -> None:
        self.hosts = hosts
        self.drivers = [
            FakeDriver(world, host, hosts[:rank].count(host), None if fabric is None else "rack")
            for rank, host in enumerate(hosts)
        ]
        self.devices = [
            device_of(driver, HostIdentity(driver.host, f"boot of {driver.host}", 1), fabric)
            for driver in self.drivers
        ]

    def __len__(self) -> int:
        return len(self.hosts)

    def allocate(self, comm: CommBackend, size_bytes: int = 4096) -> CudaSharedMemory:
        return CudaSharedMemory.allocate(comm, size_bytes, self.devices[comm.Get_rank()])

    def check_balanced(self) -> None:
        for driver in self.drivers:
            driver.check_balanced()
        assert self.drivers[0].open_fds() == []


class FakeCudaSubstrate(HostSubstrate):
    """The host's kernels on memory that came through the CUDA path."""

    def __init__(self, device: CudaDevice) -> None:
        super().__init__()
        self._device = device

    def allocate(self, comm: CommBackend, size_bytes: int) -> SymmetricMemory:
        return CudaSharedMemory.allocate(comm, size_bytes, self._device)


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))
