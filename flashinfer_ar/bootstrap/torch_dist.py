"""Ranks of a ``torch.distributed`` process group, started by torchrun or by an engine."""

from __future__ import annotations

import datetime
from operator import itemgetter
from typing import Any

import torch.distributed as dist

from flashinfer_ar import env
from flashinfer_ar.bootstrap.comm import CommBackend, split_members
from flashinfer_ar.errors import BootstrapError


class TorchDistBackend(CommBackend):
    """The ranks of ``group``; of the default group where it is ``None``.

    Any back end that carries Python objects will do. A gloo group needs no device; an NCCL group
    moves the objects through the current CUDA device, which must be set before. The deadline is
    the group's own (``timeout=`` of ``init_process_group`` and ``new_group``, by default 10 to 30
    minutes), since torch offers no other; groups made by ``Split`` get
    ``FLASHINFER_AR_TIMEOUT_S``.
    Raises ``BootstrapError`` without a default group, ``ValueError`` outside of ``group``.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not torch_world_size():
            raise BootstrapError(
                "torch.distributed has no default group: call init_process_group first"
            )
        self._group = group
        self._rank = dist.get_rank(group)
        if self._rank < 0:
            raise ValueError(f"group: rank {dist.get_rank()} of the job is not a member of it")

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return dist.get_world_size(self._group)

    def allgather(self, obj: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.Get_size()
        try:
            dist.all_gather_object(gathered, (self._rank, obj), group=self._group)
        except RuntimeError as error:
            raise BootstrapError(
                f"torch.distributed allgather: rank {self._rank} of {self.Get_size()}: {error}"
            ) from error
        # The ranks of a split group are in the order of its keys, not in torch's.
        return [value for _, value in sorted(gathered, key=itemgetter(0))]

    def Split(self, color: int, key: int) -> TorchDistBackend:
        entries = self.allgather((color, key, dist.get_rank()))
        colors = [(its_color, its_key) for its_color, its_key, _ in entries]
        # torch wants every rank of the job in every new_group, unless told that only the members
        # come. That way its name for the group depends on how many groups a rank already has, so
        # it is left to the case that has no other.
        whole_job = len(entries) == dist.get_world_size()
        groups = {}
        for each in sorted({its_color for its_color, _ in colors}) if whole_job else [color]:
            groups[each] = dist.new_group(
                [entries[rank][2] for rank in split_members(colors, each)],
                timeout=datetime.timedelta(seconds=env.timeout_s()),
                backend=dist.get_backend(self._group),
                use_local_synchronization=not whole_job,
            )
        split = TorchDistBackend(groups[color])
        split._rank = split_members(colors, color).index(self._rank)
        return split


def torch_world_size() -> int:
    """The size of torch's default group; 0 where there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
