"""What the side-by-side benchmark asks of every implementation that it times, ours included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True)
class Shape:
    """A call: ``[num_tokens, hidden]`` bf16 on each of ``world_size`` ranks.

    ``two_shot`` chooses the algorithm with two hops (vLLM: two stages). ``fused`` adds residual
    and RMSNorm.
    """

    world_size: int
    hidden: int
    num_tokens: int
    fused: bool
    two_shot: bool

    @property
    def message_bytes(self) -> int:
        """Bytes of one rank's input."""
        return self.num_tokens * self.hidden * 2


@dataclass(frozen=True)
class Tensors:
    """One rank's tensors of a call; the last three only of a fused one."""

    input: torch.Tensor
    output: torch.Tensor
    residual_in: torch.Tensor | None = None
    residual_out: torch.Tensor | None = None
    gamma: torch.Tensor | None = None


@dataclass(frozen=True)
class Room:
    """CTAs that one rank's launch has, and how many such CTAs the device holds at once."""

    ctas: int
    held: int

    def holds(self, num_ranks: int) -> bool:
        """Whether the launches of ``num_ranks`` ranks can wait for each other."""
        return num_ranks * self.ctas <= self.held


@dataclass(frozen=True)
class Copy:
    """``rows`` rows of ``row_bytes`` (both pitches and the offset in bytes, multiples of 16).

    From ``source``, an address, to ``offset`` bytes into the generation that the call will read.
    """

    source: int
    source_pitch: int
    offset: int
    pitch: int
    row_bytes: int
    rows: int


@dataclass(frozen=True)
class Feed:
    """What the peers of rank 0 would have stored into its memory for its next call.

    The generation is ``(word at generation_word >> shift) % num_generations``, as the feeder finds
    it when it runs; generation g starts at ``base + g * generation_bytes``.
    """

    base: int
    generation_word: int
    shift: int
    num_generations: int
    generation_bytes: int
    copies: Sequence[Copy] = field(default_factory=tuple)


class Contender(Protocol):
    """One implementation, with memory for ``world_size`` ranks on one device.

    All ranks share a process and a device; a peer's memory is an ordinary address. For the feeder
    harness only rank 0 ever launches.
    """

    name: str
    tolerance: float  # of the relative error of an output; 0: bit-equal to the reference

    def refusal(self, shape: Shape) -> str | None:
        """Why this shape cannot run, or ``None``."""
        ...

    def room(self, shape: Shape) -> Room:
        """From the launch's own grid rule and the driver's occupancy calculation."""
        ...

    def launch(self, shape: Shape, rank: int, tensors: Tensors, stream: int) -> None:
        """Enqueue one rank's kernel or kernels, with PDL where there is PDL; may be captured."""
        ...

    def feed(self, shape: Shape, inputs: Sequence[int], total: int) -> Feed:
        """The feed of rank 0: ``inputs`` are every rank's inputs, ``total`` their sum (bf16)."""
        ...

    def close(self) -> None:
        """Free everything; the device is idle."""
        ...
