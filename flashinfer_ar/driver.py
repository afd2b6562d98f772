"""CUDA driver calls through cuda-python, with their failures as exceptions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from cuda.bindings import driver

from flashinfer_ar.errors import CudaError


def checked(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call a driver function; its result without the code, or :class:`CudaError`."""
    code, *results = call(*arguments)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise CudaError(f"{call.__name__} answered {code.name} ({int(code)})")
    return results[0] if results else None


def primary_context(device_index: int) -> Any:
    """The context that torch uses on a device. It stays retained: torch needs it to the end too."""
    checked(driver.cuInit, 0)
    return checked(driver.cuDevicePrimaryCtxRetain, checked(driver.cuDeviceGet, device_index))


@contextlib.contextmanager
def current_context(context: Any, api: Any = driver) -> Iterator[None]:
    """Make a context current in this thread, whose own may be another device's or none."""
    checked(api.cuCtxPushCurrent, context)
    try:
        yield
    finally:
        checked(api.cuCtxPopCurrent)
