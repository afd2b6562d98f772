"""Finds the headers of the peers, which the flashinfer-python wheel ships and this project doesn't.

The package is never imported: that would take seconds and start its own compilers.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path

VERSION = "0.7.4"
"""The state that a peer keeps in memory is its own affair and changes with its version."""

ENVIRONMENT_VARIABLE = "FLASHINFER_AR_PEERS"

_INSTALL = f"pip install flashinfer-python=={VERSION}"
_HEADERS = Path("data", "include")
_SAMPLE = Path("flashinfer", "comm", "trtllm_mnnvl_allreduce.cuh")


class PeerError(Exception):
    """A peer's headers are missing, its build failed or its call failed."""


def include_folder() -> Path:
    """The folder that holds ``flashinfer/comm/*.cuh``.

    It belongs to the folder in FLASHINFER_AR_PEERS, which holds ``flashinfer/data/include``, or to
    the installed package. Raises PeerError where neither has it, or has another version.
    """
    unpacked = os.environ.get(ENVIRONMENT_VARIABLE)
    if unpacked:
        return _checked(Path(unpacked) / "flashinfer", f"{ENVIRONMENT_VARIABLE}={unpacked}")
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or not spec.submodule_search_locations:
        raise PeerError(
            f"the peers' headers are not here: {_INSTALL}, or set {ENVIRONMENT_VARIABLE} to a "
            f"folder that holds flashinfer/data/include of that wheel"
        )
    _check_version()
    package = Path(next(iter(spec.submodule_search_locations)))
    return _checked(package, f"the installed flashinfer package at {package}")


def _check_version() -> None:
    try:
        found = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        found = "unknown"
    if found != VERSION:
        raise PeerError(
            f"flashinfer-python is {found}, but the benchmark knows {VERSION}: {_INSTALL}"
        )


def _checked(package: Path, origin: str) -> Path:
    include = package / _HEADERS
    if not (include / _SAMPLE).is_file():
        raise PeerError(f"{origin} lacks {_HEADERS / _SAMPLE}: {_INSTALL}")
    return include.resolve()
