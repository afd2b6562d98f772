"""Substrates: where a workspace's memory lies and how its kernels are started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from flashinfer_ar.bootstrap import CommBackend
from flashinfer_ar.jit import HOST_TARGET, KernelSpec
from flashinfer_ar.jit.nvrtc import target_of_device
from flashinfer_ar.jit.params import Params, TimeoutRecord
from flashinfer_ar.launch.host import HostSubstrate
from flashinfer_ar.memory import SymmetricMemory

if TYPE_CHECKING:
    from flashinfer_ar.launch.cuda import CudaSubstrate


class PreparedLaunch(Protocol):
    """A kernel with its grid and the place of its parameter block."""

    @property
    def ends_at_once(self) -> bool:
        """Whether the kernel has ended when ``start`` returns."""
        ...

    def start(self, launch_with_pdl: bool) -> None:
        """Start the kernel on the current stream; on the host, run it."""
        ...


class LoadedKernel(Protocol):
    """A kernel in memory, ready to be launched."""

    def prepare(self, params: Params, num_ctas: int, may_start_early: bool) -> PreparedLaunch:
        """A launch that takes what ``params`` holds when it starts.

        ``may_start_early``: whether ``launch_with_pdl`` has an effect.
        """
        ...

    def max_resident_clusters(self) -> int:
        """How many of its clusters the device holds at once."""
        ...


class Substrate(Protocol):
    """One rank's machine, as a workspace sees it. Owned and closed by the workspace."""

    @property
    def target(self) -> str:
        """The JIT target: ``"host"`` or ``"sm_90a"`` and so on."""
        ...

    @property
    def control(self) -> int:
        """The address of the kernels' ``Control`` words, zero at the start."""
        ...

    @property
    def timeout_record(self) -> TimeoutRecord:
        """The record that kernels write when a wait outlives the deadline."""
        ...

    @property
    def compiles_rank(self) -> bool:
        """Whether the rank is a compile-time constant of this substrate's kernels."""
        ...

    def allocate(self, comm: CommBackend, size_bytes: int) -> SymmetricMemory:
        """Symmetric memory for the ring; collective; ``SymmetricMemoryError`` on all ranks."""
        ...

    def fill(self, address: int, size_bytes: int, word: int) -> None:
        """Set every 32-bit word of a block; done when it returns."""
        ...

    def load(self, spec: KernelSpec, binary: Path) -> LoadedKernel:
        """The kernel of ``spec``, which was built into ``binary``."""
        ...

    @property
    def device_identity(self) -> str | None:
        """Equal for two ranks that share a device's room for CTAs; ``None`` where none is short."""
        ...

    def synchronize(self) -> None:
        """Return when every launch so far has ended."""
        ...

    def close(self) -> None:
        """Free what is this rank's own; safe twice."""
        ...


def target_of(device: torch.device) -> str:
    """The JIT target of a device; ``ValueError`` for a GPU without kernels here."""
    if device.type == "cpu":
        return HOST_TARGET
    return target_of_device(*torch.cuda.get_device_capability(device))


def substrate_of(device: torch.device) -> Substrate:
    """The substrate for tensors on ``device``: the host for ``cpu``, CUDA for ``cuda``."""
    if device.type == "cpu":
        return HostSubstrate()
    from flashinfer_ar.launch.cuda import CudaSubstrate  # needs cuda-python

    substrate: CudaSubstrate = CudaSubstrate(device)
    return substrate


__all__ = ["LoadedKernel", "PreparedLaunch", "Substrate", "substrate_of", "target_of"]
