"""Calls into a peer's library: the C structures of shim.cuh, and a call's launches."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from benchmarks.contender import Room, Shape, Tensors
from benchmarks.peers.wheel import PeerError

EPSILON = 1e-5

WORLD_SIZES = (2, 4, 8)

Harness = Literal["virtual", "feeder"]
"""``virtual``: every rank launches. ``feeder``: rank 0 alone does, on data stored for its peers."""

HALF_ULP = 2.0**-8
"""Largest relative error of one rounding to bf16.

Inputs are spread over whole binades, so the norm of a result that was rounded once is off by 0.0017
and of one rounded three times (the sum, the sum with the residual, the normalized result) by
0.003. A share that is missing or twice there costs 0.1 and more.
"""


class _Call(ctypes.Structure):
    _fields_ = (
        ("world_size", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("num_tokens", ctypes.c_int),
        ("hidden", ctypes.c_int),
        ("two_shot", ctypes.c_int),
        ("fused", ctypes.c_int),
        ("epsilon", ctypes.c_float),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("residual_in", ctypes.c_void_p),
        ("residual_out", ctypes.c_void_p),
        ("gamma", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )


class _Room(ctypes.Structure):
    _fields_ = (("ctas", ctypes.c_int), ("held", ctypes.c_int))


class Shim:
    """A peer's library. Its calls take ``memory``, the rank's own structure of that library."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.peer_call.restype = ctypes.c_char_p
        self._rooms: dict[Shape, Room] = {}

    def room(self, shape: Shape, memory: ctypes.Structure) -> Room:
        """Of the launch that fills the device most, where a call has two.

        Loads its kernels too. Raises PeerError.
        """
        if shape not in self._rooms:
            room = _Room()
            self._check(shape, _call(shape), memory, room)
            self._rooms[shape] = Room(room.ctas, room.held)
        return self._rooms[shape]

    def launch(
        self, shape: Shape, rank: int, tensors: Tensors, stream: int, memory: ctypes.Structure
    ) -> None:
        """Enqueues ``rank``'s kernels. Raises PeerError."""
        self.room(shape, memory)  # a kernel first loaded here would wait for those that spin
        call = _call(shape)
        call.rank = rank
        call.input, call.output = tensors.input.data_ptr(), tensors.output.data_ptr()
        if shape.fused:
            call.residual_in = _address(tensors.residual_in)
            call.residual_out = _address(tensors.residual_out)
            call.gamma = _address(tensors.gamma)
        call.stream = stream
        self._check(shape, call, memory, None)

    def _check(
        self, shape: Shape, call: _Call, memory: ctypes.Structure, room: _Room | None
    ) -> None:
        place = None if room is None else ctypes.byref(room)
        error = self.library.peer_call(ctypes.byref(call), ctypes.byref(memory), place)
        if error is not None:
            raise PeerError(f"{shape}: {error.decode()}")


class Peer:
    """A peer's library, for so many ranks of one device in one harness."""

    tolerance = HALF_ULP

    def __init__(self, library: Path, world_size: int, harness: Harness) -> None:
        if world_size not in WORLD_SIZES:
            raise ValueError(f"world_size must be one of {WORLD_SIZES}, got {world_size}")
        self.harness = harness
        self._world_size = world_size
        self._shim = Shim(library)


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where each tensor's data start."""
    return [tensor.data_ptr() for tensor in tensors]


def on_device(words: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """The words on the current device, pointers by default."""
    return torch.tensor(words, dtype=dtype, device="cuda")


def filled(num_bytes: int, word: int, dtype: torch.dtype) -> torch.Tensor:
    """At least ``num_bytes`` on the current device, every word of ``dtype`` being ``word``."""
    return torch.full((-(-num_bytes // dtype.itemsize),), word, dtype=dtype, device="cuda")


def wrong_size(shape: Shape, world_size: int, capacity_bytes: int, needed_bytes: int) -> str | None:
    """What all peers refuse alike: another number of ranks, or more than the memory holds."""
    if shape.world_size != world_size:
        return f"memory is for {world_size} ranks, the call for {shape.world_size}"
    if shape.hidden % 8:
        return "hidden must be a multiple of 8"
    if needed_bytes > capacity_bytes:
        return f"a rank's memory holds {capacity_bytes} bytes a call, the call needs {needed_bytes}"
    return None


def _call(shape: Shape) -> _Call:
    return _Call(
        world_size=shape.world_size,
        num_tokens=shape.num_tokens,
        hidden=shape.hidden,
        two_shot=shape.two_shot,
        fused=shape.fused,
        epsilon=EPSILON,
    )


def _address(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        raise ValueError("a fused call needs residual_in, residual_out and gamma")
    return tensor.data_ptr()
