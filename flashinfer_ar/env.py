"""Every environment variable that flashinfer_ar reads, in one place and at the time of use."""

from __future__ import annotations

import os
from pathlib import Path

_MULTICAST_SWITCHES = (
    "FLASHINFER_AR_MULTICAST",
    "NCCL_NVLS_ENABLE",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "NVSHMEM_DISABLE_NVLS",
)


def timeout_s() -> float:
    """``FLASHINFER_AR_TIMEOUT_S``: seconds that any wait for a peer may take (default 60)."""
    return _positive_float("FLASHINFER_AR_TIMEOUT_S", 60.0)


def cache_dir() -> Path:
    """``FLASHINFER_AR_CACHE_DIR``: the kernel cache (default ``~/.cache/flashinfer_ar``)."""
    named = os.environ.get("FLASHINFER_AR_CACHE_DIR")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "flashinfer_ar"


def strategy_table() -> Path | None:
    """``FLASHINFER_AR_STRATEGY_TABLE``: a file that ``flashinfer-ar tune`` wrote, for ``AUTO``.

    It has to be there and to be for the device in use. ``None`` if unset: the user's own is sought.
    """
    named = os.environ.get("FLASHINFER_AR_STRATEGY_TABLE")
    return Path(named) if named else None


def config_dir() -> Path | None:
    """The user's settings: ``~/.config/flashinfer_ar``; ``None`` for a user without a home."""
    base = os.environ.get("XDG_CONFIG_HOME")
    try:
        return (Path(base) if base else Path("~/.config").expanduser()) / "flashinfer_ar"
    except RuntimeError:
        return None


def host_compiler() -> str:
    """``FLASHINFER_AR_CXX``: the C++20 compiler of the host substrate (default ``g++``)."""
    return os.environ.get("FLASHINFER_AR_CXX", "g++")


def cuda_archs() -> tuple[str, ...]:
    """``FLASHINFER_AR_CUDA_ARCHS``: targets of ahead-of-time builds, such as ``9.0a;10.0a``.

    Empty or unset means every supported target; the JIT layer refuses unsupported ones by name.
    """
    listed = os.environ.get("FLASHINFER_AR_CUDA_ARCHS", "")
    return tuple(item.strip() for item in listed.replace(",", ";").split(";") if item.strip())


def max_ctas() -> int | None:
    """``FLASHINFER_AR_MAX_CTAS``: most CTAs of one launch, instead of the table in plan.py.

    The same on every rank, and of one rank also where ranks share a device. A launch has at least
    one cluster (8 CTAs at most). Grids that do not fit the device are refused at creation.
    """
    value = os.environ.get("FLASHINFER_AR_MAX_CTAS")
    if not value:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"FLASHINFER_AR_MAX_CTAS={value!r}: allowed is a whole number from 1")
    return int(value)


def debug() -> bool:
    """``FLASHINFER_AR_DEBUG=1``: ranks compare each call before it is launched. Slow."""
    return os.environ.get("FLASHINFER_AR_DEBUG") == "1"


def allow_shared_device() -> bool:
    """``FLASHINFER_AR_ALLOW_SHARED_DEVICE=1``: several processes on one GPU, for tests.

    They are time-sliced: right, and some milliseconds a call.
    """
    return os.environ.get("FLASHINFER_AR_ALLOW_SHARED_DEVICE") == "1"


def multicast_switched_off_by() -> str | None:
    """The switch, ours or the ecosystem's, that turns NVLink multicast off; ``None`` if none."""
    for name in _MULTICAST_SWITCHES:
        off = "0" if name in ("FLASHINFER_AR_MULTICAST", "NCCL_NVLS_ENABLE") else "1"
        if os.environ.get(name) == off:
            return f"{name}={off}"
    return None


def _positive_float(name: str, default: float) -> float:
    value = os.environ.get(name)
    if not value:
        return default
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise ValueError(f"{name}={value!r}: allowed is a positive number of seconds")
    return number
