"""One-shot or two-shot: the choice that ``AUTO`` makes, by the limits of a strategy table."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flashinfer_ar.jit import Epilogue, KernelKind
from flashinfer_ar.strategy_tables import table_in_use


class MNNVLAllreduceFusionStrategy(enum.Enum):
    """How a call is reduced; FlashInfer's names and values. Results are bit-equal either way."""

    ONESHOT = 0
    TWOSHOT = 1
    AUTO = 99


def strategy_of(use_oneshot: bool | None) -> MNNVLAllreduceFusionStrategy:
    """The strategy that FlashInfer's ``use_oneshot`` means."""
    if use_oneshot is None:
        return MNNVLAllreduceFusionStrategy.AUTO
    if not isinstance(use_oneshot, bool):
        raise TypeError(f"use_oneshot: {use_oneshot!r}; allowed is True, False or None")
    return (
        MNNVLAllreduceFusionStrategy.ONESHOT
        if use_oneshot
        else MNNVLAllreduceFusionStrategy.TWOSHOT
    )


@dataclass(frozen=True)
class OneShotLimits:
    """The largest messages of one rank, in bytes, that ``AUTO`` sends one-shot."""

    plain: int
    fused: int

    @property
    def largest(self) -> int:
        """Up to here some call may go one-shot: what a workspace makes room for."""
        return max(self.plain, self.fused)

    def resolve(
        self, strategy: MNNVLAllreduceFusionStrategy, epilogue: Epilogue, message_bytes: int
    ) -> KernelKind:
        """The kernel of a call; a pure function, so that ranks cannot disagree."""
        if strategy is MNNVLAllreduceFusionStrategy.ONESHOT:
            return KernelKind.ONESHOT
        if strategy is MNNVLAllreduceFusionStrategy.TWOSHOT:
            return KernelKind.TWOSHOT
        limit = self.plain if epilogue is Epilogue.NONE else self.fused
        return KernelKind.ONESHOT if message_bytes <= limit else KernelKind.TWOSHOT


def one_shot_limits(target: str, world_size: int) -> OneShotLimits:
    """The limits of the strategy table in use; ``ValueError`` if it is the user's and wrong.

    The environment and a file decide: read once, when a workspace is made, and agreed on there.
    """
    table = table_in_use(target)
    return OneShotLimits(
        plain=table.entry(world_size, Epilogue.NONE).one_shot_max_bytes,
        fused=table.entry(world_size, Epilogue.ADD_RMS_NORM).one_shot_max_bytes,
    )
