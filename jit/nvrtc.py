"""Builds CUDA kernels with NVRTC through cuda-python: no nvcc, host compiler, headers or GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import re
import site
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from flashinfer_ar import env
from flashinfer_ar.errors import JitError
from flashinfer_ar.jit import cache

SUPPORTED_TARGETS = ("sm_90a", "sm_100a", "sm_103a")

_SOURCE_NAME = "kernel.cu"
_FLAGS = (
    "-std=c++20",
    # Every product rounds on its own; fma stands where the source says so.
    "-fmad=false",
    "-lineinfo",
    # No declarations for textures and for launches from kernels: a tenth of a small build.
    "-minimal",
    # Else NVRTC searches the working directory, whose files the cache key does not cover.
    "-no-source-include",
)

# Where cuda-pathfinder looks first, and the names that it loads.
_WHEEL_FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")
_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")


@dataclass(frozen=True)
class ResourceUsage:
    """What ptxas reports for a binary; with several functions, the largest value of each."""

    registers: int
    stack_frame_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int


def target_of_arch(arch: str) -> str:
    """The target named by ``arch``: ``9.0a``, ``9.0``, ``sm_90a`` and ``sm_90`` are ``sm_90a``.

    Raises ``ValueError`` for an architecture without kernels here, such as ``8.9``.
    """
    parsed = re.fullmatch(r"(?:sm_(\d+)(\d)|(\d+)\.(\d))a?", arch.strip())
    major, minor = [group for group in parsed.groups() if group] if parsed else ("", "")
    return _supported(f"sm_{major}{minor}a", f"arch={arch!r}")


def target_of_device(major: int, minor: int) -> str:
    """The target of a device's compute capability; ``ValueError`` as :func:`target_of_arch`."""
    return _supported(f"sm_{major}{minor}a", f"a device of compute capability {major}.{minor}")


def requested_targets() -> tuple[str, ...]:
    """The targets of ahead-of-time builds: those that ``FLASHINFER_AR_CUDA_ARCHS`` lists, else all.

    Raises ``ValueError`` as :func:`target_of_arch`.
    """
    return tuple(dict.fromkeys(map(target_of_arch, env.cuda_archs()))) or SUPPORTED_TARGETS


def _supported(target: str, described: str) -> str:
    if target not in SUPPORTED_TARGETS:
        raise ValueError(f"{described} is not supported; allowed: 9.0a, 10.0a, 10.3a")
    return target


def find_cubin(name: str, source: str, target: str) -> Path | None:
    """The path of the cubin of ``source`` for ``target`` if the cache has it, else ``None``.

    Loads no NVRTC where its wheel tells which one it is. Raises as :func:`build_cubin`.
    """
    compiler = _identity_of_loaded() or _wheel_identity() or _identity()
    return cache.find(_build_input(name, source, target, compiler))


def build_cubin(name: str, source: str, target: str) -> Path:
    """The path of the cubin of ``source`` for ``target``, from the cache or compiled now.

    Raises ``ValueError`` for an unsupported target and :class:`JitError` if NVRTC is missing or
    refuses the source.
    """
    found = find_cubin(name, source, target)
    if found is not None:
        return found
    build_input = _build_input(name, source, target, _identity())

    def compile_in(folder: Path) -> None:
        with _program(source) as program:
            outcome = _compile(program, build_input.command)
            (folder / cache.LOG_NAME).write_bytes(_output(program, "ProgramLog"))
            if outcome:
                raise JitError(outcome)
            (folder / build_input.binary_name).write_bytes(_output(program, "CUBIN"))

    return cache.cached_binary(build_input, compile_in)


def _build_input(name: str, source: str, target: str, compiler: str) -> cache.BuildInput:
    return cache.BuildInput(
        name=name,
        source=source,
        file_name=_SOURCE_NAME,
        binary_name="kernel.cubin",
        command=("nvrtc", f"-arch={target_of_arch(target)}", *_FLAGS, "--ptxas-options=-v"),
        compiler=compiler,
    )


def compile_ptx(source: str, target: str) -> str:
    """The PTX of ``source`` for ``target``, not cached. Raises as :func:`build_cubin`."""
    command = ("nvrtc", f"-arch={target_of_arch(target)}", *_FLAGS)
    with _program(source) as program:
        outcome = _compile(program, command)
        if outcome:
            log = _output(program, "ProgramLog").decode(errors="replace")
            raise JitError(f"{outcome}\ncommand: {' '.join(command)}\n{log}")
        return _output(program, "PTX").decode()


def resource_usage(binary: Path) -> ResourceUsage:
    """Registers and memory of a kernel of :func:`build_cubin`, read from the log beside it.

    Raises :class:`JitError` if that log has no report.
    """
    log = binary.with_name(cache.LOG_NAME)
    text = log.read_text(errors="replace")

    def largest(pattern: str) -> int:
        return max(map(int, re.findall(pattern, text)), default=0)

    if not largest(r"Used (\d+) registers"):
        raise JitError(f"no resource report of ptxas in {log}")
    return ResourceUsage(
        registers=largest(r"Used (\d+) registers"),
        stack_frame_bytes=largest(r"(\d+) bytes stack frame"),
        spill_store_bytes=largest(r"(\d+) bytes spill stores"),
        spill_load_bytes=largest(r"(\d+) bytes spill loads"),
        shared_bytes=largest(r"(\d+) bytes smem"),
    )


def _compile(program: object, command: tuple[str, ...]) -> str:
    """Compile; the empty string for success, else what NVRTC calls the failure."""
    options = [os.fsencode(option) for option in (*command[1:], f"-I{cache.include_dir()}")]
    if library_facts()[:2] >= (12, 9):
        options.append(b"-no-cache")  # its own, on disk: what comes from there has no log
    nvrtc = _bindings()
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    return "" if result == nvrtc.nvrtcResult.NVRTC_SUCCESS else str(result.name)


@contextlib.contextmanager
def _program(source: str) -> Iterator[object]:
    program = _call("nvrtcCreateProgram", source.encode(), _SOURCE_NAME.encode(), 0, [], [])
    try:
        yield program
    finally:
        _call("nvrtcDestroyProgram", program)


def _output(program: object, what: str) -> bytes:
    # A bytearray: the binding writes into the buffer, and short bytes objects are shared.
    buffer = bytearray(_call(f"nvrtcGet{what}Size", program))
    _call(f"nvrtcGet{what}", program, buffer)
    return bytes(buffer) if what == "CUBIN" else bytes(buffer).rstrip(b"\0")


def _call(function: str, *arguments: object) -> Any:
    nvrtc = _bindings()
    result, *values = getattr(nvrtc, function)(*arguments)
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise JitError(f"{function} answered {result.name}")
    return values[0] if values else None


def _identity() -> str:
    return _described(*library_facts())


@functools.cache
def _identity_of_loaded() -> str | None:
    """What :func:`_identity` will say if NVRTC is loaded, as with a torch for CUDA, else ``None``.

    cuda-python uses that library too; to import its bindings takes longer than the rest of a warm
    start.
    """
    loaded = [soname for soname in _SONAMES if _is_loaded(soname)]
    if len(loaded) != 1:
        return None
    library, major, minor = ctypes.CDLL(loaded[0]), ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {Path(line.split(maxsplit=5)[-1]) for line in lines if "/libnvrtc.so." in line}
    if len(paths) != 1 or not (path := paths.pop()).is_file():
        return None
    return _described(major.value, minor.value, path.stat().st_size)


@functools.cache
def _wheel_identity() -> str | None:
    """What :func:`_identity` will say; ``None`` where only loading the library can tell.

    Loading it takes as long as the rest of a warm start. A wheel tells without: its second library
    has the version in its name. That holds if there is one wheel and no other NVRTC is loaded.
    """
    packages = site.getsitepackages() + [site.getusersitepackages()] * bool(site.ENABLE_USER_SITE)
    folders = [Path(package, folder) for package in packages for folder in _WHEEL_FOLDERS]
    libraries = [path for folder in folders for path in folder.glob("libnvrtc.so.*")]
    builtins = [path for folder in folders for path in folder.glob("libnvrtc-builtins.so.*")]
    if any(map(_is_loaded, _SONAMES)) or (len(libraries), len(builtins)) != (1, 1):
        return None
    version = re.fullmatch(r"libnvrtc-builtins\.so\.(\d+)\.(\d+)", builtins[0].name)
    return version and _described(version[1], version[2], libraries[0].stat().st_size)


def _described(major: object, minor: object, size: int) -> str:
    """The version alone does not tell patch releases apart."""
    return f"NVRTC {major}.{minor}, {size} bytes"


def _is_loaded(soname: str) -> bool:
    try:
        ctypes.CDLL(soname, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


@functools.cache
def library_facts() -> tuple[int, int, int]:
    """Version, as major and minor, and size in bytes of the NVRTC that is used.

    Raises :class:`JitError`, with what to install, without one.
    """
    nvrtc = _bindings()
    try:
        _, major, minor = nvrtc.nvrtcVersion()
        loaded = importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib("nvrtc")
    except (ImportError, RuntimeError) as error:
        raise _missing(error) from error
    return major, minor, Path(loaded.abs_path).stat().st_size


def _bindings() -> ModuleType:
    try:
        return importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise _missing(error) from error


def _missing(error: Exception) -> JitError:
    return JitError(
        "CUDA kernels need NVRTC; install it with: pip install cuda-bindings nvidia-cuda-nvrtc "
        f"(with CUDA 12: nvidia-cuda-nvrtc-cu12); loading it failed with: {error}"
    )
