"""The kernel instances of a workspace: what its calls use, and what is built and loaded ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashinfer_ar import plan
from flashinfer_ar.jit import DType, Epilogue, KernelKind, KernelSpec


@dataclass(frozen=True)
class Instances:
    """Which kernel a call of one rank's workspace runs.

    ``hidden_size`` (elements) and ``dtype`` are the workspace's own: they get kernels compiled for
    them, all others share generic ones. ``rank=None`` is for a target whose kernels take rank and
    hidden size at run time (the host).
    """

    target: str
    world_size: int
    rank: int | None
    hidden_size: int | None
    dtype: DType | None
    multicast: bool

    def of_call(
        self,
        kind: KernelKind,
        dtype: DType,
        epilogue: Epilogue,
        hidden_size: int | None,
        tokens_on_device: int = 1,
    ) -> KernelSpec:
        """The instance for this hidden size: its own where there is one, else the generic one.

        Some have two shapes, for few and for many tokens of all ranks that share the device.
        """
        compiled = self.rank is not None
        own = (dtype, hidden_size) == (self.dtype, self.hidden_size)
        if epilogue is Epilogue.NONE or (compiled and not own):
            hidden_size = None
        hidden_packs = None if hidden_size is None else hidden_size // dtype.per_pack
        return KernelSpec(
            kind=kind,
            dtype=dtype,
            world_size=self.world_size,
            rank=self.rank,
            hidden_size=hidden_size if compiled else None,
            epilogue=epilogue,
            geometry=plan.geometry(
                self.target, kind, epilogue, hidden_packs, self.world_size, tokens_on_device
            ),
            target=self.target,
            multicast=self.multicast,
        )

    def ahead(self) -> Iterator[KernelSpec]:
        """Every instance that a call may need, whatever its shape and dtype.

        With ``rank=None`` no generic fused ones: they would have room for the largest row, and
        which sizes of row will come is not known.
        """
        for kind in KernelKind:
            for dtype in DType:
                yield self.of_call(kind, dtype, Epilogue.NONE, None)
                if self.rank is not None:
                    yield self.of_call(kind, dtype, Epilogue.ADD_RMS_NORM, None)
            if self._fuses_own_shape():
                assert self.dtype is not None  # checked by the condition
                few, many = (
                    self.of_call(kind, self.dtype, Epilogue.ADD_RMS_NORM, self.hidden_size, tokens)
                    for tokens in (1, plan.MANY_TOKENS)
                )
                yield from dict.fromkeys((few, many))

    def _fuses_own_shape(self) -> bool:
        """Whether there is one, and fused calls take it: a plain allreduce has no largest row."""
        if self.hidden_size is None or self.dtype is None:
            return False
        return self.hidden_size <= plan.max_hidden_size(self.dtype)
