"""Which device a rank has, whatever order and number CUDA_VISIBLE_DEVICES gives it (case 18).

The driver and NVML here are stand-ins for a machine of four GPUs: CUDA counts those that are
visible, in the order given; NVML counts all of them, in PCI order.
"""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import pytest
from cuda.bindings import driver

from flashinfer_ar.memory import device_place
from flashinfer_ar.memory.topology import FabricPlace

BUS_IDS = ("0000:18:00.0", "0000:2a:00.0", "0000:3a:00.0", "0000:5d:00.0")
SUCCESS = driver.CUresult.CUDA_SUCCESS
COMPLETED = 3


def visible(variable):
    """The physical GPUs behind CUDA's ordinals."""
    chosen = []
    for item in variable.split(","):
        if item.startswith("GPU-"):
            chosen.append(int(item.removeprefix("GPU-").split("-")[0]))
        else:
            chosen.append(int(item))
    return chosen


@pytest.fixture
def machine(monkeypatch):
    """``machine(variable)`` shows CUDA those GPUs; cliques tell the GPUs apart for NVML."""

    def show(variable, cliques=(7, 6, 5, 4), state=COMPLETED, cluster=b"r" * 16):
        physical = visible(variable)
        monkeypatch.setattr(device_place, "driver", fake_driver(physical))
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(cliques, state, cluster))

    return show


def fake_driver(physical):
    def bus_id(length, ordinal):
        return SUCCESS, BUS_IDS[physical[ordinal]].encode().ljust(length, b"\0")

    def uuid(ordinal):
        return SUCCESS, SimpleNamespace(bytes=bytes([physical[ordinal]] * 16))

    return SimpleNamespace(
        cuDeviceGet=lambda ordinal: (SUCCESS, ordinal),
        cuDeviceGetPCIBusId=bus_id,
        cuDeviceGetUuid=uuid,
    )


def fake_nvml(cliques, state, cluster):
    class NVMLError(Exception):
        pass

    class Info(ctypes.Structure):
        _fields_ = (
            ("version", ctypes.c_uint),
            ("clusterUuid", ctypes.c_ubyte * 16),
            ("cliqueId", ctypes.c_uint),
            ("state", ctypes.c_uint),
        )

    def fill(handle, reference):
        if cliques is None:
            raise NVMLError("not supported")
        info = reference._obj
        info.cliqueId, info.state = cliques[handle], state
        info.clusterUuid[:] = list(cluster)

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_GPU_FABRIC_STATE_COMPLETED=COMPLETED,
        c_nvmlGpuFabricInfoV_t=Info,
        nvmlGpuFabricInfo_v2=2,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByPciBusId=BUS_IDS.index,
        nvmlDeviceGetGpuFabricInfoV=fill,
    )


@pytest.mark.parametrize(
    ("variable", "ordinal", "physical"),
    [
        ("0,1,2,3", 2, 2),
        ("3,1", 0, 3),
        ("3,1", 1, 1),
        ("GPU-2-abcd,GPU-0-ef01", 0, 2),
        ("2,3", 1, 3),  # a job that starts at a GPU other than the first
        ("3", 0, 3),  # every rank sees its own GPU as number 0
    ],
)
def test_the_right_device_is_looked_up(variable, ordinal, physical, machine):
    machine(variable)
    place = device_place.place_of(ordinal)
    assert place.pci_bus_id == BUS_IDS[physical]
    assert place.uuid == bytes([physical] * 16).hex()
    assert place.fabric == FabricPlace((b"r" * 16).hex(), (7, 6, 5, 4)[physical])


@pytest.mark.parametrize(
    "facts",
    [{"cliques": None}, {"state": COMPLETED - 1}, {"cluster": bytes(16)}],
    ids=["no fabric information", "fabric not up", "no cluster"],
)
def test_without_a_fabric_that_is_up_there_is_none(facts, machine):
    machine("0", **facts)
    assert device_place.place_of(0).fabric is None


def test_without_nvml_there_is_no_fabric(machine, monkeypatch):
    machine("0")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert device_place.place_of(0).fabric is None
