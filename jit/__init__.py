"""From a kernel specification to a binary in the cache: NVRTC for GPUs, g++ for the host."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flashinfer_ar.jit.gxx import build_shared_object, find_shared_object
from flashinfer_ar.jit.nvrtc import build_cubin, find_cubin
from flashinfer_ar.jit.spec import HOST_TARGET, DType, Epilogue, Geometry, KernelKind, KernelSpec


def build(spec: KernelSpec) -> Path:
    """The path of the binary of ``spec``, from the cache or compiled now.

    A shared object for the host, a cubin otherwise; the entry point is ``spec.name``.
    Raises :class:`~flashinfer_ar.errors.JitError` if the build fails.
    """
    if spec.target == HOST_TARGET:
        return build_shared_object(spec.name, spec.source())
    return build_cubin(spec.name, spec.source(), spec.target)


def build_all(specs: Sequence[KernelSpec]) -> list[Path]:
    """The paths of the binaries of ``specs``, in their order; raises as :func:`build_each`."""
    return list(build_each(specs))


def build_each(
    specs: Sequence[KernelSpec], num_workers: int | None = None
) -> Generator[Path, None, None]:
    """The paths of the binaries of ``specs`` in their order, each as soon as it is there.

    ``num_workers`` compilers at a time, by default one a CPU core. Raises as :func:`build`, for the
    first one that fails; what has not begun by then, or when it is closed, is left out.
    """
    found = [_find(spec) for spec in specs]
    # Threads are enough: NVRTC runs without the GIL, and g++ in a process of its own.
    with ThreadPoolExecutor(num_workers or len(os.sched_getaffinity(0))) as pool:
        missing = (spec for spec, path in zip(specs, found, strict=True) if path is None)
        built = pool.map(build, missing)
        try:
            yield from (path or next(built) for path in found)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _find(spec: KernelSpec) -> Path | None:
    if spec.target == HOST_TARGET:
        return find_shared_object(spec.name, spec.source())
    return find_cubin(spec.name, spec.source(), spec.target)


__all__ = [
    "HOST_TARGET",
    "DType",
    "Epilogue",
    "Geometry",
    "KernelKind",
    "KernelSpec",
    "build",
    "build_all",
    "build_each",
]
