"""What the library asks of a group of ranks: the ``CommBackend`` protocol."""

from __future__ import annotations

from typing import Any, Protocol


class CommBackend(Protocol):
    """A group of ranks that exchange small Python objects while they set up.

    The names are FlashInfer's, so an engine's own adapter fits without a subclass. Every method
    but the first two is collective: all ranks of the group call it, in the same order. A lost peer
    or an expired deadline raises ``BootstrapError``; after that the group is unusable.
    """

    def Get_rank(self) -> int:
        """This rank's place in the group."""
        ...

    def Get_size(self) -> int:
        """The number of ranks in the group."""
        ...

    def allgather(self, obj: Any) -> list[Any]:
        """Every rank's ``obj``, in rank order."""
        ...

    def bcast(self, obj: Any, root: int) -> Any:
        """The ``obj`` of rank ``root`` of this group (not of the job)."""
        if not 0 <= root < self.Get_size():
            raise ValueError(f"root={root}: allowed is 0 to {self.Get_size() - 1}")
        # One collective per adapter is one place for deadlines; objects here are a few hundred
        # bytes, so what the other ranks send along (None) costs nothing that matters.
        return self.allgather(obj if self.Get_rank() == root else None)[root]

    def barrier(self) -> None:
        """Return once every rank of the group has called it."""
        self.allgather(None)

    def Split(self, color: int, key: int) -> CommBackend:
        """The group of the ranks that gave ``color``, ordered by ``key``, then by rank here."""
        ...


def split_members(entries: list[tuple[int, int]], color: int) -> list[int]:
    """The ranks of one color, in their new order; ``entries`` are (color, key) in rank order."""
    members = [rank for rank, (its_color, _) in enumerate(entries) if its_color == color]
    return sorted(members, key=lambda rank: entries[rank][1])
