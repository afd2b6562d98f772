"""One-shot or two-shot: the choice that ``AUTO`` makes, as data with its provenance."""

from __future__ import annotations

import enum
import sys

from flashinfer_ar.jit import HOST_TARGET, KernelKind


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


# The largest message in bytes (num_tokens * hidden * itemsize of one rank) that AUTO sends one-
# shot, by world size; a world size between two entries takes the larger one's limit.
#
# Modelled, not measured: one-shot pays (W - 1) * S of ingress, two-shot 2 * (W - 1) / W * S and a
# second hop of 1.1 us, so they meet at S = 1.1 us * bandwidth / ((W - 1) * (1 - 2 / W)); bandwidth
# is NVLink's nameplate, 450 GB/s a direction on Hopper and 900 GB/s on Blackwell. Two ranks never
# gain from two-shot.
_HOPPER = {2: sys.maxsize, 3: 742_500, 4: 330_000, 6: 148_500, 8: 94_285, 16: 37_714, 72: 7_171}
_BLACKWELL = {world_size: min(2 * limit, sys.maxsize) for world_size, limit in _HOPPER.items()}
_ONE_SHOT_MAX_BYTES = {
    "sm_90a": _HOPPER,
    "sm_100a": _BLACKWELL,
    "sm_103a": _BLACKWELL,
    # No link here either: a copy costs the same however far it goes. Two-shot from the size on
    # where it does less work in all.
    HOST_TARGET: {2: sys.maxsize, 72: 65_536},
}


def one_shot_max_bytes(target: str, world_size: int) -> int:
    """The largest message of one rank, in bytes, that ``AUTO`` sends one-shot."""
    table = _ONE_SHOT_MAX_BYTES[target]
    return table[min(listed for listed in table if listed >= world_size)]


def resolve(
    strategy: MNNVLAllreduceFusionStrategy, target: str, world_size: int, message_bytes: int
) -> KernelKind:
    """The kernel of a call; a pure function, so that ranks cannot disagree."""
    if strategy is MNNVLAllreduceFusionStrategy.ONESHOT:
        return KernelKind.ONESHOT
    if strategy is MNNVLAllreduceFusionStrategy.TWOSHOT:
        return KernelKind.TWOSHOT
    small = message_bytes <= one_shot_max_bytes(target, world_size)
    return KernelKind.ONESHOT if small else KernelKind.TWOSHOT
