"""TensorRT-LLM's fused allreduce: Lamport stores to each peer in one shot, barriers in two.

Its memory (a rank): what the two shots exchange, ``[2, num_tokens, hidden]``; 256 CTAs' barrier
flags of every rank, 0 at first; three Lamport generations, every 16-bit word -0.0, of which a call
uses ``[world_size, num_tokens, hidden]``; five words: a counter that is 0 between calls, the
barriers' flag, the generation of the next call, the bytes of a generation, and the values that the
last one-shot call used, which the next one clears. So shapes and algorithms may follow each other
as they like. Pointers to every rank's first three, then to its own words, make up its workspace.

Numerics: fp32 sum over the ranks in order, rounded to bf16, or a bf16 rounding after each rank
where ``fp32_acc`` is off; residual added in fp32 and rounded; the norm in fp32 from that, rounded
once more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.contender import Copy, Feed, Room, Shape, Tensors
from benchmarks.peers import shim

_NUM_GENERATIONS = 3
_NEGATIVE_ZERO = -(2**15)  # bf16's, as an int16
_BARRIER_CTAS = 256
_GENERATION_WORD = 2
_MAX_GENERATION_BYTES = 2**30 - 16  # the kernel's offsets to the third are 32 bits wide
_MAX_HIDDEN = 65536


class _Memory(ctypes.Structure):
    _fields_ = (("workspace", ctypes.c_void_p), ("fp32_acc", ctypes.c_int))


class TensorRtLlm(shim.Peer):
    """Memory for calls of up to ``max_tokens * hidden`` values, of whatever shape.

    Triggers dependent launches at the end, its default. vLLM has ``fp32_acc`` on, SGLang and
    FlashInfer's own interface have it off by default. In the feeder harness inputs must not hold
    -0.0.
    """

    name = "TensorRT-LLM"

    def __init__(
        self,
        library: Path,
        world_size: int,
        max_tokens: int,
        hidden: int,
        harness: shim.Harness = "virtual",
        fp32_acc: bool = True,
    ) -> None:
        super().__init__(library, world_size, harness)
        if not fp32_acc:
            self.tolerance = 2 * shim.HALF_ULP  # rounded rank by rank: off by up to 0.004
        self._generation_bytes = max_tokens * hidden * 2 * world_size
        if self._generation_bytes > _MAX_GENERATION_BYTES:
            raise ValueError(
                f"max_tokens * hidden * world_size must be at most {_MAX_GENERATION_BYTES // 2}, "
                f"got {self._generation_bytes // 2}"
            )
        ranks = range(world_size)
        exchange = [shim.filled(self._generation_bytes, 0, torch.int32) for _ in ranks]
        flags = [shim.filled(world_size * _BARRIER_CTAS * 4, 0, torch.int32) for _ in ranks]
        lamport_bytes = _NUM_GENERATIONS * self._generation_bytes
        self._lamport = [shim.filled(lamport_bytes, _NEGATIVE_ZERO, torch.int16) for _ in ranks]
        state = [0, 0, 0, self._generation_bytes, 0]
        self._states = [shim.on_device(state, torch.int32) for _ in ranks]
        shared = [*exchange, *flags, *self._lamport]
        self._workspaces = [shim.on_device(shim.addresses([*shared, own])) for own in self._states]
        self._shared = shared
        self._memories = [_Memory(space.data_ptr(), fp32_acc) for space in self._workspaces]
        torch.cuda.synchronize()

    def refusal(self, shape: Shape) -> str | None:
        """Why this shape cannot run, or ``None``."""
        if shape.hidden > _MAX_HIDDEN:
            return f"hidden must be at most {_MAX_HIDDEN}"
        if shape.two_shot and self.harness == "feeder":
            return "it reads its peers' memory between barriers, for which they must run"
        if shape.two_shot and shape.num_tokens <= shape.world_size:
            return f"two shots need more than {shape.world_size} tokens"
        needed = shape.message_bytes * shape.world_size
        return shim.wrong_size(shape, self._world_size, self._generation_bytes, needed)

    def room(self, shape: Shape) -> Room:
        """CTAs of its launch, on its own grid. Raises PeerError."""
        return self._shim.room(shape, self._memories[0])

    def launch(self, shape: Shape, rank: int, tensors: Tensors, stream: int) -> None:
        """Enqueues one rank's kernel, with PDL."""
        self._shim.launch(shape, rank, tensors, stream, self._memories[rank])

    def feed(self, shape: Shape, inputs: Sequence[int], total: int) -> Feed:
        """The feed of rank 0's next call, of one shot; ``total`` plays no part."""
        if shape.two_shot:
            raise ValueError("shape.two_shot must be False: two shots cannot be fed")
        return Feed(
            base=self._lamport[0].data_ptr(),
            generation_word=self._states[0].data_ptr() + 4 * _GENERATION_WORD,
            shift=0,
            num_generations=_NUM_GENERATIONS,
            generation_bytes=self._generation_bytes,
            copies=feed_copies(shape, inputs),
        )

    def close(self) -> None:
        """Frees the memory; the device is idle."""
        for tensors in (self._shared, self._lamport, self._states, self._workspaces):
            tensors.clear()


def feed_copies(shape: Shape, inputs: Sequence[int]) -> list[Copy]:
    """What ranks 1 to ``world_size - 1`` store into rank 0's generation in one shot."""
    row = shape.hidden * 2
    return [
        Copy(
            source=inputs[peer],
            source_pitch=row,
            offset=peer * shape.message_bytes,
            pitch=row,
            row_bytes=row,
            rows=shape.num_tokens,
        )
        for peer in range(1, shape.world_size)
    ]
