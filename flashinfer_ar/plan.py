"""Geometry, grid and memory of a call: pure functions of its shape and of fixed settings.

Never of free memory or of the local device's size: every rank computes the same plan.
"""

from __future__ import annotations

from flashinfer_ar.jit import HOST_TARGET, DType, Epilogue, Geometry, KernelKind
from flashinfer_ar.jit.spec import PACK_BYTES, WARP_SIZE

# SMs that a launch may count on, by cluster size. Grids are persistent, with rows in a grid-stride
# loop, because a waiting CTA keeps its place: all of a grid must be resident at once. An H200 has
# 132 SMs, a B200 148; the SMs of a cluster lie in one GPC, so larger clusters leave some SMs
# unused. On the host threads are fibers of one core, and more CTAs only cost.
_HOPPER_SMS = {1: 128, 2: 128, 4: 112, 8: 96}
_BLACKWELL_SMS = {1: 144, 2: 144, 4: 128, 8: 112}
_NUM_SMS = {
    "sm_90a": _HOPPER_SMS,
    "sm_100a": _BLACKWELL_SMS,
    "sm_103a": _BLACKWELL_SMS,
    HOST_TARGET: {1: 4},
}

_MAX_ROW_PACKS = 8192
_MANY_RANKS = 16
MANY_TOKENS = 1 << 31  # more than any grid has room for
_GENERIC_CUDA = Geometry(warps=16, cluster=8, packs_per_thread=2)


def max_hidden_size(dtype: DType) -> int:
    """The largest hidden size that the fused kernels take, in elements."""
    return _MAX_ROW_PACKS * dtype.per_pack


def geometry(
    target: str,
    kind: KernelKind,
    epilogue: Epilogue,
    hidden_packs: int | None,
    world_size: int,
    tokens_on_device: int = 1,
) -> Geometry:
    """The shape of one row's work; ``hidden_packs=None`` for an instance that takes any row.

    ``tokens_on_device`` counts the tokens of all ranks that share the device.
    """
    if target == HOST_TARGET:
        return _host_geometry(epilogue, hidden_packs)
    if epilogue is Epilogue.NONE:
        return _tile_geometry(kind, world_size)
    if hidden_packs is None:
        return _GENERIC_CUDA
    wide = _wide_geometry(hidden_packs, world_size)
    room = _room(target, wide)
    few = tokens_on_device * wide.cluster <= min(room, _NUM_SMS[target][1])
    return wide if few or world_size > _MANY_RANKS else _dense_geometry(hidden_packs, world_size)


def _host_geometry(epilogue: Epilogue, hidden_packs: int | None) -> Geometry:
    """One warp of fibers, with a power of two of packs each so that few kernels are ever built."""
    if epilogue is Epilogue.NONE:
        return Geometry(warps=1, cluster=1, packs_per_thread=4)
    packs_per_lane = -(-(hidden_packs or _MAX_ROW_PACKS) // WARP_SIZE)
    return Geometry(warps=1, cluster=1, packs_per_thread=1 << (packs_per_lane - 1).bit_length())


def _tile_geometry(kind: KernelKind, world_size: int) -> Geometry:
    """As many CTAs an SM as the registers for a batch of slots allow."""
    if world_size > _MANY_RANKS:
        return Geometry(4, 1, 1, ctas_per_sm=2)
    if kind is KernelKind.TWOSHOT:
        return Geometry(4, 1, 2, ctas_per_sm=4)
    return Geometry(4, 1, 1, ctas_per_sm=8 if world_size <= 8 else 4)


def _wide_geometry(hidden_packs: int, world_size: int) -> Geometry:
    """For few tokens: each is spread over SMs, which add their share of L2 bandwidth."""
    cluster = next((n for n in (1, 2) if hidden_packs <= n * 128), 4 if hidden_packs <= 2048 else 8)
    packs_per_thread = 1 if hidden_packs <= cluster * 16 * WARP_SIZE else 2
    warps = -(-hidden_packs // (cluster * packs_per_thread * WARP_SIZE))
    fits_twice = warps <= 8 and world_size <= _MANY_RANKS
    return Geometry(warps, cluster, packs_per_thread, ctas_per_sm=2 if fits_twice else 1)


def _dense_geometry(hidden_packs: int, world_size: int) -> Geometry:
    """For many tokens: no CTA more than a token needs, and two packs a thread where they fit.

    With as many tokens as SMs the instructions that every thread repeats decide, not the latency
    of one token.
    """
    packs_per_thread = 2 if world_size <= 8 else 1
    cluster = next(n for n in (1, 2, 4, 8) if hidden_packs <= n * packs_per_thread * 512 or n == 8)
    if hidden_packs > cluster * packs_per_thread * 512:
        packs_per_thread = 2
    warps = -(-hidden_packs // (cluster * packs_per_thread * WARP_SIZE))
    # 16 warps an SM leave 128 registers a thread; 20 leave 96, enough up to 6 ranks, and where only
    # they make room for a second CTA (hidden 5120) that gains up to a quarter.
    most_warps = 20 if warps > 8 and world_size <= 6 else 16
    return Geometry(warps, cluster, packs_per_thread, ctas_per_sm=most_warps // warps)


def max_clusters(target: str, shape: Geometry, ranks_on_device: int, max_ctas: int | None) -> int:
    """The most clusters of one launch. Ranks that share a device share its room.

    ``max_ctas`` (``FLASHINFER_AR_MAX_CTAS``) replaces the table's cap on the CTAs of one rank.
    """
    room = _room(target, shape)
    if ranks_on_device > 1:
        room = room * 3 // 4 // ranks_on_device  # may_start_early says why
    return max((max_ctas or room) // shape.cluster, 1)


def releases_early(target: str, shape: Geometry, ranks_on_device: int, num_clusters: int) -> bool:
    """Whether a grid lets the next one start as soon as its own data is on its way (PDL).

    That hides the next launch, up to 1.2 us. A grid that fills more of the device than a quarter
    keeps the next one's CTAs from spreading evenly, which costs more (docs/performance.md).
    """
    used = num_clusters * shape.cluster * ranks_on_device
    return 4 * used <= _room(target, shape)


def may_start_early(target: str, shape: Geometry, ranks_on_device: int, num_clusters: int) -> bool:
    """Whether a launch may start before the one before it has ended.

    Ranks that share a device wait for each other's grids there, and grids that started early hold
    room while they wait for those before them. The grids that these follow hold a quarter of the
    room at most, else they would not have let them start: three quarters are for all ranks' next.
    """
    used = num_clusters * shape.cluster * ranks_on_device
    return ranks_on_device == 1 or 4 * used <= 3 * _room(target, shape)


def _room(target: str, shape: Geometry) -> int:
    """CTAs that the device holds at once."""
    return _NUM_SMS[target][shape.cluster] * shape.ctas_per_sm


def num_rows(shape: Geometry, epilogue: Epilogue, num_tokens: int, hidden_packs: int) -> int:
    """Rows of a call, each the work of one cluster: tokens, or tiles where tokens do not matter."""
    if epilogue is Epilogue.NONE:
        return -(-num_tokens * hidden_packs // shape.row_packs)
    return num_tokens


def slots(kind: KernelKind, world_size: int, num_packs: int) -> int:
    """Slots of one generation that ``num_packs`` packs use; the layouts are in the kernels."""
    if kind is KernelKind.ONESHOT:
        return world_size * num_packs
    stripes = -(-num_packs // WARP_SIZE)
    owner_packs = -(-stripes // world_size) * WARP_SIZE
    return world_size * owner_packs + num_packs


def generation_bytes(kind: KernelKind, world_size: int, message_bytes: int) -> int:
    """Bytes of one generation that a message of ``message_bytes`` (of one rank) needs."""
    return slots(kind, world_size, -(-message_bytes // PACK_BYTES)) * PACK_BYTES


def generation_bytes_for_all(world_size: int, largest: int, one_shot_max: int) -> int:
    """Room for messages up to ``largest`` bytes two-shot and up to ``one_shot_max`` one-shot."""
    return max(
        generation_bytes(KernelKind.TWOSHOT, world_size, largest),
        generation_bytes(KernelKind.ONESHOT, world_size, min(largest, one_shot_max)),
    )


def whole_packs(size_bytes: int) -> int:
    """``size_bytes`` rounded up to whole packs, which 32-bit slot numbers must be able to count."""
    rounded = -(-size_bytes // PACK_BYTES) * PACK_BYTES
    if rounded // PACK_BYTES > 0xFFFFFFFF:
        raise ValueError(
            f"a generation of {rounded} bytes: allowed is less than {2**32 * PACK_BYTES}"
        )
    return rounded
