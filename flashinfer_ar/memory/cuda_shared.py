"""Symmetric memory between GPUs of several processes: one path for POSIX fd and fabric handles.

create -> export -> exchange -> import -> map, with a vote after each step: all ranks go on, or all
raise one error and take back what they made. On one host handles travel as file descriptors; across
hosts, inside one NVLink domain, as fabric handles.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flashinfer_ar.bootstrap import CommBackend, agree_on_value, agreed_step
from flashinfer_ar.driver import checked
from flashinfer_ar.errors import CudaError, SymmetricMemoryError
from flashinfer_ar.memory import multicast
from flashinfer_ar.memory.cuda_device import (
    CudaDevice,
    HandleKind,
    access_of,
    granularity_of,
    handle_type_of,
    properties_of,
    round_up,
    try_handle,
)
from flashinfer_ar.memory.fd_exchange import exchange_fds
from flashinfer_ar.memory.topology import DevicePlace, exchange_places

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

# Not ready is what a fabric manager or an IMEX daemon answers while it starts; it passes.
_NUM_TRIES = 10
_PAUSE_S = 0.5
_NOT_READY = "SYSTEM_NOT_READY"
# What a driver answers that does not have a kind of handle; anything else is a fault.
_REFUSALS = ("INVALID_VALUE", "NOT_PERMITTED", "NOT_SUPPORTED")
_BETWEEN_HOSTS = (
    ". Between hosts memory is shared by fabric handles alone, which need an NVLink fabric and an "
    "IMEX channel (/dev/nvidia-caps-imex-channels)"
)
_WITHOUT_MULTICAST = "stores go to each rank by itself, without NVLink multicast: %s"


class CudaSharedMemory:
    """One block on every rank's GPU, mapped by all ranks side by side in one range of addresses.

    ``close`` waits for nobody: a block's physical memory lives until no rank maps it any more.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        size_bytes: int,
        device: CudaDevice,
        kind: HandleKind,
        over_all: multicast.Multicast | None,
    ) -> None:
        self.size_bytes = size_bytes
        self._rank = rank
        self._device = device
        self._properties = properties_of(device, kind)
        self._kind = kind
        unit = granularity_of(device, self._properties)
        self._block_bytes = round_up(over_all.size_bytes if over_all else size_bytes, unit)
        self._multicast = over_all
        self._relies_on_multicast = False
        self._range_bytes = num_ranks * self._block_bytes
        base = int(checked(device.api.cuMemAddressReserve, self._range_bytes, 0, 0, 0))
        self.peers = tuple(range(base, base + self._range_bytes, self._block_bytes))
        self.local = self.peers[rank]
        self._mapped: list[int] = []

    @classmethod
    def allocate(cls, comm: CommBackend, size_bytes: int, device: CudaDevice) -> CudaSharedMemory:
        """``size_bytes`` on every rank's device; collective.

        Raises ``SymmetricMemoryError`` on all ranks, with nothing left behind, if the ranks cannot
        share memory or a driver call fails on one of them; the text names rank, host, device, call
        and code.
        """
        places = exchange_places(comm, device.place)
        return _until_ready(lambda: cls._allocate(comm, size_bytes, device, places))

    @classmethod
    def _allocate(
        cls, comm: CommBackend, size_bytes: int, device: CudaDevice, places: Sequence[DevicePlace]
    ) -> CudaSharedMemory:
        kind = _agree_on_kind(comm, device, places)
        with contextlib.ExitStack() as undo:
            made = _reserve_multicast(comm, size_bytes, device, kind)
            if made is not None:
                undo.callback(_quietly, made.close)
            with agreed_step(comm, "reserve addresses"), device.current():
                memory = cls(comm.Get_rank(), comm.Get_size(), size_bytes, device, kind, made)
                undo.pop_all()
                undo.callback(_quietly, memory.close)
            agree_on_value(comm, "the bytes of a block of CUDA memory", memory._block_bytes)
            memory._map(comm)
            undo.pop_all()
        return memory

    @property
    def multicast(self) -> int | None:
        """The address whose stores reach every rank's block; ``None`` where there is none."""
        return self._multicast.address if self._multicast else None

    def map(self, comm: CommBackend) -> None:
        """Give every block physical memory, shared by all ranks; collective.

        Raises as ``allocate`` does; the addresses stay reserved then, with no memory behind them.
        """
        _until_ready(lambda: self._map(comm))

    def unmap(self) -> None:
        """Let go of the physical memory and keep the addresses; safe twice."""
        with self._device.current():
            self._unmap()

    def close(self) -> None:
        """Let go of memory and addresses, which are gone (0 and empty) from here; safe twice."""
        if not self.peers:
            return
        base = self.peers[0]
        self.local, self.peers = 0, ()
        with self._device.current(), contextlib.ExitStack() as calls:
            calls.callback(checked, self._device.api.cuMemAddressFree, base, self._range_bytes)
            calls.callback(self._unmap)
            if self._multicast is not None:
                calls.callback(self._multicast.close)
        self._multicast = None

    def _map(self, comm: CommBackend) -> None:
        api = self._device.api
        handles: dict[int, Any] = {}
        with contextlib.ExitStack() as undo:
            undo.callback(_quietly, self._roll_back, handles)
            step = f"create CUDA memory to be shared by {self._kind.value}"
            with agreed_step(comm, step), self._device.current():
                own = checked(api.cuMemCreate, self._block_bytes, self._properties, 0)
                handles[self._rank] = own
            self._exchange(comm, handles)
            with agreed_step(comm, "map the CUDA memory of all ranks"), self._device.current():
                access = access_of(self._device)
                for peer, address in enumerate(self.peers):
                    checked(api.cuMemMap, address, self._block_bytes, 0, handles[peer], 0)
                    self._mapped.append(address)
                    checked(api.cuMemSetAccess, address, self._block_bytes, [access], 1)
            self._attach_multicast(comm, own)
            with agreed_step(comm, "release the handles of CUDA memory"), self._device.current():
                self._release(handles)  # needed on the way only: a mapping keeps its memory
            undo.pop_all()

    def _attach_multicast(self, comm: CommBackend, own_block: Any) -> None:
        """All ranks get multicast, or none: unicast works too. Once in use it has to come back."""
        if self._multicast is None:
            return
        try:
            self._multicast.attach(comm, own_block)
            self._relies_on_multicast = True
        except SymmetricMemoryError as error:
            if self._relies_on_multicast:
                raise
            _log.warning(_WITHOUT_MULTICAST, error)
            _quietly(self._multicast.close)
            self._multicast = None

    def _exchange(self, comm: CommBackend, handles: dict[int, Any]) -> None:
        """Add the peers' handles to this rank's own."""
        api, kind_code = self._device.api, handle_type_of(self._device.api, self._kind)
        with contextlib.ExitStack() as fds_to_close:
            step = f"export CUDA memory for {self._kind.value}"
            with agreed_step(comm, step), self._device.current():
                own = handles[self._rank]
                exported = checked(api.cuMemExportToShareableHandle, own, kind_code, 0)
                if self._kind is HandleKind.POSIX_FD:
                    fds_to_close.callback(os.close, int(exported))
            if self._kind is HandleKind.POSIX_FD:
                shared: Sequence[Any] = exchange_fds(comm, int(exported))
                for fd in shared:
                    fds_to_close.callback(os.close, fd)
            else:
                shared = comm.allgather(bytes(exported.data))
            step = f"import CUDA memory by {self._kind.value}"
            with agreed_step(comm, step), self._device.current():
                for peer, handle in enumerate(shared):
                    if peer != self._rank:
                        handles[peer] = checked(
                            api.cuMemImportFromShareableHandle, handle, kind_code
                        )

    def _roll_back(self, handles: dict[int, Any]) -> None:
        with self._device.current(), contextlib.ExitStack() as calls:
            calls.callback(self._release, handles)
            calls.callback(self._unmap)

    # The next two make every call, also after one that fails: that is what the stacks are for.

    def _unmap(self) -> None:
        with contextlib.ExitStack() as calls:
            if self._multicast is not None:
                calls.callback(self._multicast.detach)
            while self._mapped:
                address = self._mapped.pop()
                calls.callback(checked, self._device.api.cuMemUnmap, address, self._block_bytes)

    def _release(self, handles: dict[int, Any]) -> None:
        with contextlib.ExitStack() as calls:
            while handles:
                calls.callback(checked, self._device.api.cuMemRelease, handles.popitem()[1])


def _quietly(action: Callable[..., None], *arguments: Any) -> None:
    """Take a step back; the error that made it necessary is the one to report."""
    with contextlib.suppress(CudaError):
        action(*arguments)


def _reserve_multicast(
    comm: CommBackend, size_bytes: int, device: CudaDevice, kind: HandleKind
) -> multicast.Multicast | None:
    """A multicast address on every rank, with nothing behind it yet, or on none; collective."""
    if not multicast.is_wanted(comm, device):
        return None
    made = None
    try:
        with agreed_step(comm, "reserve multicast addresses"), device.current():
            handle_type = handle_type_of(device.api, kind)
            made = multicast.Multicast(device, handle_type, size_bytes, comm.Get_size())
    except SymmetricMemoryError as error:
        _log.warning(_WITHOUT_MULTICAST, error)
        if made is not None:
            _quietly(made.close)
        return None
    return made


def _until_ready(action: Callable[[], Result]) -> Result:
    """Run ``action``, again while it fails because a rank's driver is not ready.

    All ranks get the same error from it, so all of them come back, or none.
    """
    for _ in range(_NUM_TRIES - 1):
        try:
            return action()
        except SymmetricMemoryError as error:
            if _NOT_READY not in str(error):
                raise
        time.sleep(_PAUSE_S)
    return action()


def _agree_on_kind(
    comm: CommBackend, device: CudaDevice, places: Sequence[DevicePlace]
) -> HandleKind:
    """The first kind that works on every rank, found by trying: attributes promise too much.

    An H200 in a container reports fabric support and answers NOT_PERMITTED to an allocation.
    """
    one_host = len({place.host for place in places}) == 1
    kinds = (HandleKind.POSIX_FD, HandleKind.FABRIC) if one_host else (HandleKind.FABRIC,)
    refusals = []
    hint = "" if one_host else _BETWEEN_HOSTS
    for kind in kinds:
        answers: list[str | None] = comm.allgather(try_handle(device, kind))
        if all(answer is None for answer in answers):
            return kind
        refusals += [
            f"{kind.value}: rank {rank} on host {places[rank].host.hostname}: {answer}"
            for rank, answer in enumerate(answers)
            if answer is not None
        ]
        if not all(_is_refusal(answer) for answer in answers if answer):
            hint = ""
            break  # another kind of handle would meet the same fault
    raise SymmetricMemoryError("CUDA memory cannot be shared: " + "; ".join(refusals) + hint)


def _is_refusal(answer: str) -> bool:
    return any(name in answer for name in _REFUSALS)
