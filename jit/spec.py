"""What one kernel instance is compiled for, and the source text that says so."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flashinfer_ar.jit.nvrtc import SUPPORTED_TARGETS
from flashinfer_ar.jit.params import layout_assertions

HOST_TARGET = "host"
PACK_BYTES = 16
WARP_SIZE = 32
MAX_WORLD_SIZE = 72


class KernelKind(str, enum.Enum):
    """The algorithm; the value names the header."""

    ONESHOT = "oneshot"
    TWOSHOT = "twoshot"


class Epilogue(str, enum.Enum):
    """What follows the sum."""

    NONE = "none"
    ADD_RMS_NORM = "add_rms_norm"


class DType(str, enum.Enum):
    """Element types; the values are torch's names."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.FLOAT32 else 2

    @property
    def per_pack(self) -> int:
        """Elements in a 16-byte pack."""
        return PACK_BYTES // self.itemsize


@dataclass(frozen=True)
class Geometry:
    """How many threads share one row: warps a CTA, CTAs a row (cluster), packs a thread.

    ``ctas_per_sm`` CTAs fit into one SM: the compiler spends no more registers than that allows.
    """

    warps: int
    cluster: int
    packs_per_thread: int
    ctas_per_sm: int = 1

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.warps * WARP_SIZE

    @property
    def row_packs(self) -> int:
        """The most packs that a row can have."""
        return self.threads * self.cluster * self.packs_per_thread


@dataclass(frozen=True)
class KernelSpec:
    """One kernel instance. Everything here is a compile-time constant of it.

    ``rank=None`` and ``hidden_size=None`` (elements) leave the two to the parameter block: one
    binary then serves every rank, or every hidden size up to the geometry's capacity.
    ``target`` is ``"host"`` or one of ``sm_90a``, ``sm_100a``, ``sm_103a``.
    """

    kind: KernelKind
    dtype: DType
    world_size: int
    rank: int | None
    hidden_size: int | None
    epilogue: Epilogue
    geometry: Geometry
    target: str
    multicast: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size={self.world_size}: allowed is 1 to {MAX_WORLD_SIZE}")
        if self.rank is not None and not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank}: allowed is 0 to {self.world_size - 1}")
        if self.target not in (HOST_TARGET, *SUPPORTED_TARGETS):
            allowed = ", ".join((HOST_TARGET, *SUPPORTED_TARGETS))
            raise ValueError(f"target={self.target!r}: allowed is {allowed}")
        if self.multicast and self.target == HOST_TARGET:
            raise ValueError("multicast=True: the host has no multicast addresses")

    @property
    def name(self) -> str:
        """The entry point's name, and that of the cache folder: readable, not unique."""
        rank = "any" if self.rank is None else self.rank
        hidden = "any" if self.hidden_size is None else self.hidden_size
        multicast = "_multicast" if self.multicast else ""
        return (
            f"{self.kind.value}_{self.epilogue.value}_{self.dtype.value}"
            f"_w{self.world_size}_r{rank}_h{hidden}{multicast}"
        )

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: the two tables and two mbarriers of ClusterExchange."""
        if self.epilogue is Epilogue.NONE:
            return 0
        groups = self.geometry.row_packs // WARP_SIZE
        tables = -(-2 * groups * 4 // 8) * 8
        return -(-(tables + 2 * 8) // 16) * 16

    def source(self) -> str:
        """The translation unit: everything else is in the headers."""
        template = {KernelKind.ONESHOT: "OneShot", KernelKind.TWOSHOT: "TwoShot"}[self.kind]
        element = {"float32": "Float32", "float16": "Float16", "bfloat16": "BFloat16"}[self.dtype]
        return f"""#include <flashinfer_ar/{self.kind.value}.cuh>
using namespace flashinfer_ar;
constexpr Config kConfig = {self._config()};
using Kernel = {template}<{element}, kConfig>;
FAR_KERNEL({self.name}, Kernel)
{layout_assertions(self.world_size)}
{self._shared_assertion()}"""

    def _config(self) -> str:
        rank = "kAnyRank" if self.rank is None else self.rank
        hidden = "kAnyHidden"
        if self.hidden_size is not None:
            hidden = str(self.hidden_size // self.dtype.per_pack)
        epilogue = {Epilogue.NONE: "kNone", Epilogue.ADD_RMS_NORM: "kAddRmsNorm"}[self.epilogue]
        return (
            f"{{.world_size = {self.world_size}, .rank = {rank}, .hidden_packs = {hidden}, "
            f".warps = {self.geometry.warps}, .cluster = {self.geometry.cluster}, "
            f".packs_per_thread = {self.geometry.packs_per_thread}, "
            f".ctas_per_sm = {self.geometry.ctas_per_sm}, "
            f".multicast = {str(self.multicast).lower()}, .epilogue = Epilogue::{epilogue}}}"
        )

    def _shared_assertion(self) -> str:
        # The host sizes the struct itself, and its ClusterExchange has counters for mbarriers.
        if self.target == HOST_TARGET or self.epilogue is Epilogue.NONE:
            return ""
        size = self.shared_bytes
        return f'static_assert(sizeof(Kernel::Shared) == {size}, "jit/spec.py disagrees");\n'
