"""What a strategy table holds."""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flashinfer_ar.jit import Epilogue

UNLIMITED = sys.maxsize


class Source(str, enum.Enum):
    """Where a limit comes from."""

    MEASURED = "measured"
    MEASURED_KERNELS = "measured kernels, modelled link"
    MODELLED = "modelled"


class Point(NamedTuple):
    """Both kernels at one size of message: microseconds a call, of the slowest rank."""

    message_bytes: int
    one_shot_us: float
    two_shot_us: float


@dataclass(frozen=True)
class Entry:
    """The largest message of one rank in bytes that ``AUTO`` sends one-shot.

    ``run`` says, for people, what the limit was measured or modelled with; ``points`` is what was
    timed, before the link model.
    """

    world_size: int
    epilogue: Epilogue
    one_shot_max_bytes: int
    source: Source
    run: Mapping[str, Any]
    points: tuple[Point, ...] = ()

    @property
    def key(self) -> tuple[int, str]:
        """What another table's entry replaces, and the order of entries."""
        return self.world_size, self.epilogue.value


@dataclass(frozen=True)
class Table:
    """The entries for one target."""

    target: str
    entries: tuple[Entry, ...]

    def entry(self, world_size: int, epilogue: Epilogue) -> Entry:
        """A world size between two entries takes the larger one's.

        So do all fused epilogues those of ``ADD_RMS_NORM``: what follows the sum is the same in
        both kernels.
        """
        listed = epilogue if epilogue is Epilogue.NONE else Epilogue.ADD_RMS_NORM
        return min(
            (e for e in self.entries if e.epilogue is listed and e.world_size >= world_size),
            key=lambda e: e.world_size,
        )

    def updated(self, newer: Sequence[Entry]) -> Table:
        """This table with ``newer`` entries in place of its own of the same key."""
        merged = {each.key: each for each in (*self.entries, *newer)}
        return Table(self.target, tuple(merged[key] for key in sorted(merged)))
