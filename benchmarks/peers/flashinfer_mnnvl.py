"""FlashInfer's MNNVL allreduce: Lamport stores to a multicast address, one shot or two.

Its memory (a rank): three generations of ``generation_bytes``, every 32-bit word -0.0. A one-shot
call uses ``[num_tokens, world_size, hidden]`` of a generation. A two-shot call uses two halves:
the first holds the shares of the tokens that the rank sums, which are those with
``token % world_size == rank``, as ``[ceil(num_tokens / world_size), world_size, hidden]``, the
second the sums, as ``[num_tokens, hidden]``. Nine words of flags: the generation of the next call,
the one to clear, bytes of a generation, then for the one to clear its number of parts and the
bytes used of up to four, and a counter that is 0 between calls. Since what a call clears is what
the flags say that the last one used, shapes and algorithms may follow each other as they like.

Numerics: fp32 sum over the ranks in order, rounded to bf16; residual added in bf16; the norm in
fp32 from that, rounded once more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.contender import Copy, Feed, Room, Shape, Tensors
from benchmarks.peers import shim

_NUM_GENERATIONS = 3
_NEGATIVE_ZERO = -(2**31)  # fp32's, as an int32
_MAX_HIDDEN = 65536  # 8 CTAs of 1024 threads, which take 8 values each


class _Memory(ctypes.Structure):
    _fields_ = (
        ("buffers", ctypes.c_void_p),
        ("local", ctypes.c_void_p),
        ("multicast", ctypes.c_void_p),
        ("flags", ctypes.c_void_p),
    )


class FlashInferMnnvl(shim.Peer):
    """Memory for calls of up to ``max_tokens * hidden`` values, of whatever shape.

    Runs in the feeder harness alone, where the multicast address is rank 0's own memory. Its CTAs
    wait for nothing but what is fed and what they store themselves, so there even a call that the
    device cannot hold at once ends. Inputs and sums that are fed must not hold -0.0.
    """

    name = "FlashInfer MNNVL"

    def __init__(
        self,
        library: Path,
        world_size: int,
        max_tokens: int,
        hidden: int,
        harness: shim.Harness = "feeder",
    ) -> None:
        super().__init__(library, world_size, harness)
        # Two bytes a value, and a two-shot call rounds its tokens up to whole turns of the ranks.
        rounded = -(-max_tokens // world_size) * world_size
        self._generation_bytes = -(-2 * hidden * rounded * world_size // 32) * 32
        self._buffers = [
            shim.filled(_NUM_GENERATIONS * self._generation_bytes, _NEGATIVE_ZERO, torch.int32)
            for _ in range(world_size)
        ]
        self._pointers = shim.on_device(shim.addresses(self._buffers))
        self._flags = shim.on_device([0, 2, self._generation_bytes, *[0] * 6], torch.int32)
        local = self._buffers[0].data_ptr()
        self._memory = _Memory(self._pointers.data_ptr(), local, local, self._flags.data_ptr())
        torch.cuda.synchronize()

    def refusal(self, shape: Shape) -> str | None:
        """Why this shape cannot run, or ``None``."""
        if self.harness != "feeder":
            return "it stores to a multicast address, which one device alone does not have"
        if shape.hidden > _MAX_HIDDEN:
            return f"hidden must be at most {_MAX_HIDDEN}"
        needed = generation_bytes_used(shape)
        return shim.wrong_size(shape, self._world_size, self._generation_bytes, needed)

    def room(self, shape: Shape) -> Room:
        """CTAs of the fuller of its launches, on its own grid. Raises PeerError."""
        return self._shim.room(shape, self._memory)

    def launch(self, shape: Shape, rank: int, tensors: Tensors, stream: int) -> None:
        """Enqueues rank 0's kernel (two for a fused two-shot call), each with PDL."""
        if rank != 0:
            raise ValueError(f"rank must be 0 in the feeder harness, got {rank}")
        self._shim.launch(shape, rank, tensors, stream, self._memory)

    def feed(self, shape: Shape, inputs: Sequence[int], total: int) -> Feed:
        """The feed of rank 0's next call."""
        return Feed(
            base=self._buffers[0].data_ptr(),
            generation_word=self._flags.data_ptr(),
            shift=0,
            num_generations=_NUM_GENERATIONS,
            generation_bytes=self._generation_bytes,
            copies=feed_copies(shape, inputs, total, self._generation_bytes),
        )

    def close(self) -> None:
        """Frees the memory; the device is idle."""
        self._buffers.clear()
        del self._pointers, self._flags


def generation_bytes_used(shape: Shape) -> int:
    """Bytes that a generation must have for this call."""
    if not shape.two_shot:
        return shape.message_bytes * shape.world_size
    turns = -(-shape.num_tokens // shape.world_size)
    return 2 * turns * shape.world_size * shape.hidden * 2


def feed_copies(
    shape: Shape, inputs: Sequence[int], total: int, generation_bytes: int
) -> list[Copy]:
    """What ranks 1 to ``world_size - 1`` store into rank 0's generation."""
    row = shape.hidden * 2
    turn = shape.world_size * row
    peers = range(1, shape.world_size)

    def tokens_of(rank: int) -> int:
        return len(range(rank, shape.num_tokens, shape.world_size))

    # In one shot rank 0 sums every token, in two those with token % world_size == 0.
    summed, every = (tokens_of(0), turn) if shape.two_shot else (shape.num_tokens, row)
    copies = [
        Copy(
            source=inputs[peer],
            source_pitch=every,
            offset=peer * row,
            pitch=turn,
            row_bytes=row,
            rows=summed,
        )
        for peer in peers
    ]
    if not shape.two_shot:
        return copies
    return copies + [
        Copy(
            source=total + peer * row,
            source_pitch=turn,
            offset=generation_bytes // 2 + peer * row,
            pitch=turn,
            row_bytes=row,
            rows=tokens_of(peer),
        )
        for peer in peers
        if tokens_of(peer) > 0
    ]
