"""Where each rank's device is. Ranks tell each other before anything is shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashinfer_ar import env
from flashinfer_ar.bootstrap import CommBackend, HostIdentity
from flashinfer_ar.errors import SymmetricMemoryError


@dataclass(frozen=True)
class FabricPlace:
    """A GPU's place in its NVLink fabric; those of one cluster and clique reach each other."""

    cluster_uuid: str
    clique_id: int


@dataclass(frozen=True)
class DevicePlace:
    """What a rank tells its peers about its device."""

    host: HostIdentity
    pci_bus_id: str
    uuid: str
    fabric: FabricPlace | None  # None: no fabric, or one that is not up


def exchange_places(comm: CommBackend, place: DevicePlace) -> list[DevicePlace]:
    """Every rank's place, in rank order; collective.

    Raises ``SymmetricMemoryError`` on all ranks alike if two ranks have one device
    (``FLASHINFER_AR_ALLOW_SHARED_DEVICE=1`` allows it, for tests), or if they are on several hosts
    without one NVLink domain: what could never work is refused before anything waits for it.
    """
    places: list[DevicePlace] = comm.allgather(place)
    sharing_allowed = comm.allgather(env.allow_shared_device())
    problem = _problem(places, all(sharing_allowed))
    if problem is not None:
        raise SymmetricMemoryError(problem)
    return places


def _problem(places: Sequence[DevicePlace], sharing_allowed: bool) -> str | None:
    devices = [(place.host, place.uuid) for place in places]
    if len(set(devices)) < len(devices) and not sharing_allowed:
        shared = [rank for rank, each in enumerate(devices) if devices.count(each) > 1]
        return (
            f"ranks {shared} do not have a device of their own: {_listed(places, shared)}. Give "
            f"each its own (torch.cuda.set_device, CUDA_VISIBLE_DEVICES)"
        )
    if len({place.host for place in places}) == 1:
        return None
    domains = {place.fabric for place in places}
    if len(domains) == 1 and None not in domains:
        return None
    return (
        "the ranks are on several hosts that no NVLink domain joins: "
        f"{_listed(places, range(len(places)))}. Memory is shared between hosts only inside one "
        f"fabric cluster and clique (nvidia-smi -q shows both)"
    )


def _listed(places: Sequence[DevicePlace], ranks: Sequence[int]) -> str:
    return "; ".join(
        f"rank {rank}: host {places[rank].host.hostname}, device {places[rank].pci_bus_id}, "
        f"{_shown(places[rank].fabric)}"
        for rank in ranks
    )


def _shown(fabric: FabricPlace | None) -> str:
    if fabric is None:
        return "no fabric"
    return f"fabric cluster {fabric.cluster_uuid} clique {fabric.clique_id}"
