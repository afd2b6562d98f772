"""From a kernel specification to a binary in the cache: NVRTC for GPUs, g++ for the host."""

from __future__ import annotations

from pathlib import Path

from flashinfer_ar.jit.gxx import build_shared_object
from flashinfer_ar.jit.nvrtc import build_cubin
from flashinfer_ar.jit.spec import HOST_TARGET, DType, Epilogue, Geometry, KernelKind, KernelSpec


def build(spec: KernelSpec) -> Path:
    """The path of the binary of ``spec``, from the cache or compiled now.

    A shared object for the host, a cubin otherwise; the entry point is ``spec.name``.
    Raises :class:`~flashinfer_ar.errors.JitError` if the build fails.
    """
    if spec.target == HOST_TARGET:
        return build_shared_object(spec.name, spec.source())
    return build_cubin(spec.name, spec.source(), spec.target)


__all__ = ["HOST_TARGET", "DType", "Epilogue", "Geometry", "KernelKind", "KernelSpec", "build"]
