"""The host substrate: ranks are threads or processes of one machine, kernels run where called."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

from flashinfer_ar.bootstrap import CommBackend, InProcessBackend
from flashinfer_ar.jit import HOST_TARGET, KernelSpec
from flashinfer_ar.jit.params import Control, Params, TimeoutRecord
from flashinfer_ar.memory import HostSharedMemory, InProcessMemory, SymmetricMemory


class HostLaunch:
    """A kernel with its grid and parameter block."""

    ends_at_once = True

    def __init__(self, entry: Callable[[int, int], None], params: Params, num_ctas: int) -> None:
        self._entry = entry
        self._params = params
        self._num_ctas = num_ctas

    def start(self, launch_with_pdl: bool) -> None:
        """Run the kernel to its end; there is no earlier grid to overlap with."""
        del launch_with_pdl
        self._entry(ctypes.addressof(self._params), self._num_ctas)


class HostKernel:
    """A kernel in a shared object. ctypes releases the GIL while it runs."""

    def __init__(self, spec: KernelSpec, binary: Path) -> None:
        self._entry = ctypes.CDLL(str(binary))[spec.name]
        self._entry.argtypes = (ctypes.c_void_p, ctypes.c_uint32)
        self._entry.restype = None

    def prepare(self, params: Params, num_ctas: int, may_start_early: bool) -> HostLaunch:
        del may_start_early  # a rank's kernels run one after the other
        return HostLaunch(self._entry, params, num_ctas)

    def max_resident_clusters(self) -> int:
        """No limit: every thread of a grid is a fiber."""
        return sys.maxsize


class HostSubstrate:
    """Kernels as fibers of the calling thread, rings in memory that all ranks map."""

    target = HOST_TARGET
    # Compiling takes a second here, so one shared object serves every rank.
    compiles_rank = False
    device_identity = None

    def __init__(self) -> None:
        self._control = Control()
        self._record = TimeoutRecord()

    @property
    def control(self) -> int:
        return ctypes.addressof(self._control)

    @property
    def timeout_record(self) -> TimeoutRecord:
        return self._record

    def allocate(self, comm: CommBackend, size_bytes: int) -> SymmetricMemory:
        if isinstance(comm, InProcessBackend):
            return InProcessMemory.allocate(comm, size_bytes)
        return HostSharedMemory.allocate(comm, size_bytes)

    def fill(self, address: int, size_bytes: int, word: int) -> None:
        pattern = word.to_bytes(4, "little") * (min(size_bytes, 1 << 20) // 4)
        for offset in range(0, size_bytes, len(pattern)):
            ctypes.memmove(address + offset, pattern, min(len(pattern), size_bytes - offset))

    def load(self, spec: KernelSpec, binary: Path) -> HostKernel:
        return HostKernel(spec, binary)

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass
