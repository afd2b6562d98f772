"""Builds kernels of the host substrate with g++, as shared objects for ctypes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from flashinfer_ar import env
from flashinfer_ar.errors import JitError
from flashinfer_ar.jit import cache

_TIMEOUT_S = 300.0

_FLAGS = (
    "-std=c++20",
    "-O2",
    "-fPIC",
    "-shared",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-fvisibility=hidden",
    # Unique symbols bind the statics of all instances to those of the first one loaded.
    "-fno-gnu-unique",
    # Every product rounds on its own, as on the device.
    "-ffp-contract=off",
    # The fortified longjmp refuses to switch between the stacks of fibers.
    "-U_FORTIFY_SOURCE",
    "-D_FORTIFY_SOURCE=0",
)


def find_shared_object(name: str, source: str) -> Path | None:
    """The path of the shared object of ``source`` if the cache has it, else ``None``.

    Raises :class:`JitError` if the compiler is missing.
    """
    return cache.find(_build_input(name, source))


def build_shared_object(name: str, source: str) -> Path:
    """The path of the shared object of ``source``, from the cache or compiled now.

    Symbols are hidden: an entry point needs ``extern "C"`` and default visibility. Raises
    :class:`JitError` if the compiler is missing or refuses.
    """
    build_input = _build_input(name, source)
    return cache.cached_binary(build_input, lambda folder: _run(build_input.command_line(), folder))


def _build_input(name: str, source: str) -> cache.BuildInput:
    compiler = _find_compiler()
    return cache.BuildInput(
        name=name,
        source=source,
        file_name="kernel.cpp",
        binary_name="kernel.so",
        command=(compiler, *_FLAGS),
        compiler=_identity(compiler),
    )


def _find_compiler() -> str:
    wanted = env.host_compiler()
    found = shutil.which(wanted)
    if found is None:
        raise JitError(
            f"no compiler {wanted!r} for the CPU kernels: install g++ 11 or newer (Debian and "
            "Ubuntu: apt-get install g++) or name one in FLASHINFER_AR_CXX"
        )
    return str(Path(found).absolute())


def _identity(compiler: str) -> str:
    """Tells compilers apart without running one, so that a warm start runs none."""
    path = Path(compiler).resolve()
    info = path.stat()
    return f"{path} {info.st_size} bytes, mtime {info.st_mtime_ns} ns, {os.uname().machine}"


def _run(command: tuple[str, ...], folder: Path) -> None:
    # The log is a file, not a pipe: after a timeout nothing waits for the compiler's children.
    with (folder / cache.LOG_NAME).open("wb") as log:
        try:
            subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise JitError(_reason(error)) from error


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"the compiler ended with status {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"the compiler took more than {_TIMEOUT_S:.0f} s"
    return f"the compiler did not start: {error}"
