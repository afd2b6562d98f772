"""How GPU memory can travel to another process: file descriptors, fabric handles, multicast.

Handles are tried with a real minimal allocation and export, since attributes promise too much.
Multicast is not: a multicast object takes a resource of the whole NVLink domain.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_ar import env
from flashinfer_ar.bootstrap import host_identity
from flashinfer_ar.doctor import nvml
from flashinfer_ar.doctor.finding import Finding, Status, grouped
from flashinfer_ar.doctor.gpus import Driver, Gpu
from flashinfer_ar.errors import CudaError
from flashinfer_ar.memory.topology import DevicePlace

_IMEX_CHANNELS = Path("/dev/nvidia-caps-imex-channels")

_POSIX_FD = "POSIX fd handles"
_FABRIC = "fabric handles"
_NVLINK_FABRIC = "NVLink fabric"
_WORKS = "allocated and exported"
_JOIN_HOSTS = (
    "between hosts it would need an NVLink fabric and an IMEX channel: nvidia-imex running on all "
    f"hosts, {_IMEX_CHANNELS}/channel0 in the container"
)


@dataclass(frozen=True)
class Answers:
    """What each tried GPU, by index, answered to a minimal allocation and export."""

    posix_fd: Mapping[int, str]
    fabric: Mapping[int, str]

    @property
    def kinds(self) -> str:
        """The kinds that work on all tried GPUs, for comparing ranks."""
        named = {"POSIX fd": self.posix_fd, "fabric": self.fabric}
        return " and ".join(name for name, each in named.items() if _all_work(each)) or "none"


def try_handles(driver: Driver, gpus: Sequence[Gpu]) -> Answers:
    """Allocate and export on each of ``gpus``, in both kinds."""
    from flashinfer_ar.memory.cuda_device import HandleKind  # needs cuda-python

    posix_fd, fabric = {}, {}
    for gpu in gpus:
        posix_fd[gpu.index] = _answer(driver.api, gpu, HandleKind.POSIX_FD)
        fabric[gpu.index] = (
            _answer(driver.api, gpu, HandleKind.FABRIC) if gpu.fabric else "not supported"
        )
    return Answers(posix_fd, fabric)


def _answer(api: Any, gpu: Gpu, kind: Any) -> str:
    from flashinfer_ar.memory.cuda_device import CudaDevice, try_handle

    try:
        with _context(api, gpu) as context:
            place = DevicePlace(host_identity(), gpu.pci_bus_id, gpu.uuid, None)
            refusal = try_handle(CudaDevice(api, gpu.ordinal, context, place), kind)
    except (CudaError, OSError) as error:
        refusal = str(error)
    # Without the device, so that equal answers of several GPUs are equal.
    return refusal.rpartition(": ")[2] if refusal else _WORKS


@contextlib.contextmanager
def _context(api: Any, gpu: Gpu) -> Iterator[Any]:
    from flashinfer_ar.driver import checked

    context = checked(api.cuDevicePrimaryCtxRetain, gpu.ordinal)
    try:
        yield context
    finally:
        checked(api.cuDevicePrimaryCtxRelease, gpu.ordinal)


def _all_work(answers: Mapping[int, str]) -> bool:
    return set(answers.values()) == {_WORKS}


def posix_fd(answers: Answers) -> Finding:
    """The kind that ranks of one host use."""
    seen = grouped("GPU", answers.posix_fd)
    if _all_work(answers.posix_fd):
        return Finding(_POSIX_FD, Status.OK, seen, "processes of one host can share GPU memory")
    meaning = "ranks of one host share GPU memory by fabric handles, if those work, or not at all"
    remedy = "see the driver's answer; out of memory: free some on that GPU"
    status = Status.WARNING if _all_work(answers.fabric) else Status.FAILURE
    return Finding(_POSIX_FD, status, seen, meaning, remedy)


def fabric(gpus: Sequence[Gpu], answers: Answers) -> Finding:
    """The only kind that works between hosts."""
    promised = grouped("GPU", {gpu.index: f"attribute {int(gpu.fabric)}" for gpu in gpus})
    seen = f"{promised}; {grouped('GPU', answers.fabric)}; {_imex()}"
    if _all_work(answers.fabric):
        meaning = "hosts of one NVLink domain can share GPU memory"
        return Finding(_FABRIC, Status.OK, seen, meaning)
    if not any(gpu.fabric for gpu in gpus):
        meaning = "POSIX fd on this host; these GPUs cannot be joined with those of other hosts"
        return Finding(_FABRIC, Status.OK, seen, meaning)
    meaning = f"POSIX fd on this host; {_JOIN_HOSTS}"
    remedy = "nothing for one host; else start nvidia-imex and give the container an IMEX channel"
    return Finding(_FABRIC, Status.WARNING, seen, meaning, remedy)


def _imex() -> str:
    try:
        channels = sorted(_IMEX_CHANNELS.iterdir())
    except OSError as error:
        return f"{_IMEX_CHANNELS}: {error.strerror}"
    usable = [each.name for each in channels if os.access(each, os.R_OK | os.W_OK)]
    return f"{_IMEX_CHANNELS}: {', '.join(usable) or 'no channel that this user may open'}"


def fabric_states(gpus: Sequence[Gpu]) -> dict[int, nvml.Fabric]:
    """By GPU index; :class:`~flashinfer_ar.doctor.nvml.NvmlMissing` without NVML."""
    return {gpu.index: nvml.fabric_of(gpu.pci_bus_id) for gpu in gpus}


def nvlink_fabric(states: Mapping[int, nvml.Fabric]) -> Finding:
    """State, cluster and clique as NVML tells them."""
    seen = grouped("GPU", {index: str(state) for index, state in states.items()})
    if len({state.place for state in states.values()}) > 1:
        meaning = "ranks on GPUs of different cliques do not reach each other over NVLink"
        return Finding(_NVLINK_FABRIC, Status.WARNING, seen, meaning, "look at the NVLink domain")
    if any(state.state in ("not started", "in progress") for state in states.values()):
        meaning = "the fabric is not up (yet): workspaces wait some seconds for it, then fail"
        remedy = "look at nvidia-fabricmanager and at nvidia-smi -q, Fabric"
        return Finding(_NVLINK_FABRIC, Status.WARNING, seen, meaning, remedy)
    if any(state.place for state in states.values()):
        meaning = "ranks whose GPUs have this cluster and clique reach each other, on any host"
        return Finding(_NVLINK_FABRIC, Status.OK, seen, meaning)
    meaning = "no fabric between hosts: all ranks of a workspace have to be on this host"
    return Finding(_NVLINK_FABRIC, Status.OK, seen, meaning)


def no_nvml(reason: str) -> Finding:
    """Without NVML nobody can tell which hosts are joined."""
    meaning = "ranks of one host work; ranks on several hosts are refused, their fabric unknown"
    return Finding(_NVLINK_FABRIC, Status.WARNING, reason, meaning, "pip install nvidia-ml-py")


def multicast(gpus: Sequence[Gpu]) -> Finding:
    """By attribute and switches alone."""
    topic = "multicast"
    seen = grouped("GPU", {gpu.index: f"attribute {int(gpu.multicast)}" for gpu in gpus})
    switch = env.multicast_switched_off_by()
    if not all(gpu.multicast for gpu in gpus):
        return Finding(topic, Status.OK, seen, "unicast: a store for each peer, same results")
    if switch is not None:
        meaning = "unicast: a store for each peer, same results, more NVLink traffic"
        return Finding(
            topic, Status.WARNING, f"{seen}, {switch}", meaning, f"unset {switch.partition('=')[0]}"
        )
    seen += ", no switch turns it off; not tried, the doctor makes no multicast object"
    return Finding(topic, Status.OK, seen, "one store reaches all peers")
