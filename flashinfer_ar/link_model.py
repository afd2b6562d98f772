"""What NVLink adds to kernels that were timed as virtual ranks, and the choice it gives by itself.

One GPU shows what the kernels cost (instructions, polling, bookkeeping, epilogue); its L2 stands
for the link. :func:`over_link` takes what was timed there to GPUs of their own::

    t(S) = v(S0) + (v(S) - v(S0)) / W  +  hops * (hop_us - local_hop_us)  +  ingress(S) / bandwidth

``v`` is the time as virtual ranks and ``S0`` the smallest message timed. What grows with the
message is taken for work for which W ranks share one GPU (its L2, and its CTAs, of which each has a
W-th), so that a rank with a GPU of its own needs a W-th of it; what does not grow, for a chain of
latencies, which nobody shares. Each hop is in ``v`` already, as a store and a poll in L2, so only
the difference is added.

How far off: the stores of the publications are in ``v`` and in the link term, which also do not
overlap here with the reduction, so sizes well above the crossover come out too slow, up to twofold
where the GPU's own part is as large as the link's; for both kernels, so the crossover moves less.
Small messages of many ranks come out too slow as well, since their interference on one GPU counts
as latency, and ranks that share a GPU may get another shape of a row (``plan.py``). Contention in
switches is left out. Only a run with a GPU for each rank measures all that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashinfer_ar.jit import KernelKind
from flashinfer_ar.strategy_tables import UNLIMITED, Point

_NUM_HOPS = {KernelKind.ONESHOT: 1, KernelKind.TWOSHOT: 2}


@dataclass(frozen=True)
class Link:
    """What joins the GPUs, seen from one of them.

    ``bandwidth_gb_s`` is of one direction. A hop is a store that reaches a peer's memory and the
    load that finds it there: ``hop_us`` from GPU to GPU, ``local_hop_us`` within one.
    """

    bandwidth_gb_s: float
    hop_us: float
    local_hop_us: float


# Bandwidth is NVLink's nameplate. Of a hop, the store to a peer takes 0.79 us and the load from L2
# 0.31 (both arXiv 2607.16100, GB200; no such figures are published for Hopper, whose 0.82 us
# between two GPUs fits them). A store within one GPU is taken for half of a load's way and back.
_HOPPER = Link(bandwidth_gb_s=450.0, hop_us=1.1, local_hop_us=0.46)
_BLACKWELL = Link(bandwidth_gb_s=900.0, hop_us=1.1, local_hop_us=0.46)
LINKS = {"sm_90a": _HOPPER, "sm_100a": _BLACKWELL, "sm_103a": _BLACKWELL}


def ingress_bytes(kind: KernelKind, world_size: int, message_bytes: int) -> float:
    """Bytes that come into one GPU: whole messages of all peers, or two passes of a W-th each."""
    from_peers = (world_size - 1) * message_bytes
    return from_peers if kind is KernelKind.ONESHOT else 2 * from_peers / world_size


def modelled_limit(link: Link, world_size: int) -> int:
    """The largest one-shot message in bytes if kernels cost nothing but hops and transfers.

    Both meet where the two-shot's second hop costs as much as the one-shot's excess of bytes.
    Two ranks never gain from a second hop: it saves them no bytes.
    """
    if world_size <= 2:
        return UNLIMITED
    excess = ingress_bytes(KernelKind.ONESHOT, world_size, 1)
    excess -= ingress_bytes(KernelKind.TWOSHOT, world_size, 1)
    return round(link.hop_us * link.bandwidth_gb_s * 1e3 / excess)


def over_link(link: Link, world_size: int, virtual: Sequence[Point]) -> list[Point]:
    """The times of ranks with a GPU each; ``virtual`` is by size, the smallest first."""
    least = virtual[0]

    def time_us(kind: KernelKind, size: int, timed_us: float, least_us: float) -> float:
        own = least_us + (timed_us - least_us) / world_size
        farther = _NUM_HOPS[kind] * (link.hop_us - link.local_hop_us)
        return own + farther + ingress_bytes(kind, world_size, size) / (link.bandwidth_gb_s * 1e3)

    return [
        Point(
            size,
            time_us(KernelKind.ONESHOT, size, one_shot_us, least.one_shot_us),
            time_us(KernelKind.TWOSHOT, size, two_shot_us, least.two_shot_us),
        )
        for size, one_shot_us, two_shot_us in virtual
    ]
