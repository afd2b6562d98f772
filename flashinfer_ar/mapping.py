"""Where one rank stands in the job: node, local rank, tensor-, context- and pipeline-parallel."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Mapping:
    """The place of ``rank`` among ``world_size`` ranks, with FlashInfer's argument names.

    Ranks are numbered tensor-parallel first, then context-parallel, then pipeline-parallel, so
    ``world_size == tp_size * cp_size * pp_size``; ``tp_size=-1`` takes what the others leave.
    The allreduce runs over ``tp_group``. ``cp_config``, the ``moe_*`` and ``attn_*`` sizes and the
    last two switches are kept for callers that pass them and play no part here.

    Raises ``ValueError``, naming the argument, for sizes that do not multiply to ``world_size``
    and for values out of range.
    """

    world_size: int = 1
    rank: int = 0
    gpus_per_node: int = 8
    _: KW_ONLY
    cp_size: int = 1
    cp_config: dict[str, Any] | None = field(default=None, hash=False)
    tp_size: int = -1
    pp_size: int = 1
    moe_cluster_size: int = -1
    moe_tp_size: int = -1
    moe_ep_size: int = -1
    attn_tp_size: int = -1
    attn_cp_size: int = -1
    auto_parallel: bool = False
    enable_attention_dp: bool = False

    def __post_init__(self) -> None:
        for name in ("world_size", "gpus_per_node", "cp_size", "pp_size"):
            _require_positive(name, getattr(self, name))
        if not isinstance(self.rank, int) or not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank!r}: allowed is 0 to {self.world_size - 1}")
        if self.tp_size == -1:
            others = self.cp_size * self.pp_size
            object.__setattr__(self, "tp_size", max(self.world_size // others, 1))
        _require_positive("tp_size", self.tp_size)
        if self.tp_size * self.cp_size * self.pp_size != self.world_size:
            raise ValueError(
                f"world_size={self.world_size}: allowed is tp_size * cp_size * pp_size = "
                f"{self.tp_size} * {self.cp_size} * {self.pp_size}"
            )

    @property
    def tp_rank(self) -> int:
        """This rank's place in ``tp_group``."""
        return self.rank % self.tp_size

    @property
    def cp_rank(self) -> int:
        """This rank's place among the context-parallel ranks."""
        return self.rank // self.tp_size % self.cp_size

    @property
    def pp_rank(self) -> int:
        """The pipeline stage."""
        return self.rank // (self.tp_size * self.cp_size)

    @property
    def local_rank(self) -> int:
        """This rank's place on its node; not a device index."""
        return self.rank % self.gpus_per_node

    @property
    def node_rank(self) -> int:
        """The node that this rank is on."""
        return self.rank // self.gpus_per_node

    @property
    def tp_group(self) -> list[int]:
        """The global ranks of the tensor-parallel group, in rank order."""
        first = self.rank - self.tp_rank
        return list(range(first, first + self.tp_size))


def _require_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: allowed is a whole number from 1")
