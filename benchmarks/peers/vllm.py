"""vLLM's custom allreduce: peers read each other's inputs between barriers, in one stage or two.

Its memory (a rank): counters of its CTAs' barriers, 0 at first and never reset, then scratch for
the rank's part of a sum in two stages. Inputs are read where they lie, which every rank must know
before: engines register an input while they capture a graph, the harness calls ``register``.

Numerics: fp32 sum over the ranks (in order; in two stages from the rank that sums onwards), rounded
to bf16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.contender import Feed, Room, Shape, Tensors
from benchmarks.peers import shim

_MAX_RANKS = 8


class _Memory(ctypes.Structure):
    _fields_ = (
        ("inputs", ctypes.c_void_p),
        ("signals", ctypes.c_void_p * _MAX_RANKS),
        ("num_ctas", ctypes.c_int),
    )


class VllmCustom(shim.Peer):
    """Memory for messages of up to ``max_tokens * hidden`` values, of whatever shape.

    ``num_ctas`` limits a launch, by default to the peer's own maximum (36). Its kernels use so many
    registers that 8 ranks of one device fit with 16 only. The peer itself uses one stage for two
    ranks, and below 512 KiB (4 ranks) or 256 KiB (8 ranks).
    """

    name = "vLLM custom"

    def __init__(
        self,
        library: Path,
        world_size: int,
        max_tokens: int,
        hidden: int,
        harness: shim.Harness = "virtual",
        num_ctas: int | None = None,
    ) -> None:
        super().__init__(library, world_size, harness)
        library_calls = self._shim.library
        library_calls.signal_bytes.restype = ctypes.c_int64
        limit: int = library_calls.max_ctas()
        self._num_ctas = limit if num_ctas is None else num_ctas
        if not 1 <= self._num_ctas <= limit:
            raise ValueError(f"num_ctas must be from 1 to {limit}, got {num_ctas}")
        self._message_bytes = max_tokens * hidden * 2
        num_bytes = library_calls.signal_bytes() + self._message_bytes
        self._signals = [shim.filled(num_bytes, 0, torch.int32) for _ in range(world_size)]
        self._registered: dict[tuple[int, int], torch.Tensor] = {}
        torch.cuda.synchronize()

    def refusal(self, shape: Shape) -> str | None:
        """Why this shape cannot run, or ``None``."""
        if self.harness != "virtual":
            return "it reads its peers' memory between barriers, for which they must run"
        if shape.fused:
            return "it has no fused kernel"
        return shim.wrong_size(shape, self._world_size, self._message_bytes, shape.message_bytes)

    def register(self, inputs: Sequence[int]) -> None:
        """Tells every rank where every rank's input of a later call lies, in the ranks' order.

        The inputs of a call must have been registered together; each set stays known.
        """
        if len(inputs) != self._world_size:
            raise ValueError(f"inputs must be {self._world_size} addresses, got {len(inputs)}")
        unused = [0] * (_MAX_RANKS - self._world_size)
        pointers = shim.on_device([*inputs, *unused])
        torch.cuda.synchronize()
        for rank, address in enumerate(inputs):
            self._registered[rank, address] = pointers

    def room(self, shape: Shape) -> Room:
        """CTAs of its launch, on its own grid. Raises PeerError."""
        return self._shim.room(shape, self._memory(0))

    def launch(self, shape: Shape, rank: int, tensors: Tensors, stream: int) -> None:
        """Enqueues one rank's kernel; it has no PDL."""
        pointers = self._registered.get((rank, tensors.input.data_ptr()))
        if pointers is None:
            raise ValueError(f"tensors.input of rank {rank} must have been registered")
        self._shim.launch(shape, rank, tensors, stream, self._memory(pointers.data_ptr()))

    def feed(self, shape: Shape, inputs: Sequence[int], total: int) -> Feed:
        """Nothing can be fed."""
        raise ValueError("vLLM's peers read inputs themselves: there is nothing to feed")

    def close(self) -> None:
        """Frees the memory; the device is idle."""
        self._signals.clear()
        self._registered.clear()

    def _memory(self, inputs: int) -> _Memory:
        signals = (ctypes.c_void_p * _MAX_RANKS)(*shim.addresses(self._signals))
        return _Memory(inputs, signals, self._num_ctas)
