"""Limits of the machine or the container, and the environment variables."""

from __future__ import annotations

import inspect
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from flashinfer_ar import env, plan
from flashinfer_ar.doctor.finding import Finding, Status
from flashinfer_ar.jit import HOST_TARGET
from flashinfer_ar.jit.nvrtc import requested_targets
from flashinfer_ar.strategy import one_shot_limits
from flashinfer_ar.workspace import NUM_GENERATIONS

_SHM = Path("/dev/shm")
_MIB = 2**20
# 8 ranks with messages of up to 512 tokens, hidden size 4096, bfloat16.
_TYPICAL_RANKS = 8
_TYPICAL_MESSAGE_BYTES = 512 * 4096 * 2
_TYPICAL = "8 ranks, 512 tokens, hidden size 4096, bfloat16"

# The variables are named in that module alone.
_KNOWN_VARIABLES = frozenset(re.findall(r"\bFLASHINFER_AR_[A-Z_]+", inspect.getsource(env)))
_ECOSYSTEM_SWITCHES = (
    "NCCL_NVLS_ENABLE",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "NVSHMEM_DISABLE_NVLS",
)
MULTICAST_SWITCHES = ("FLASHINFER_AR_MULTICAST", *_ECOSYSTEM_SWITCHES)


def shared_memory() -> Finding:
    """Whether ``/dev/shm`` holds the rings of CPU tensors."""
    try:
        with tempfile.TemporaryFile(dir=_SHM):
            free = shutil.disk_usage(_SHM).free
    except OSError as error:
        meaning = "processes cannot share CPU memory: allreduce of CPU tensors cannot run"
        remedy = "mount a tmpfs on /dev/shm that this user can write (docker: --shm-size=1g)"
        return Finding(str(_SHM), Status.FAILURE, str(error), meaning, remedy)
    needed = _typical_workspaces_bytes()
    size = f"{needed // _MIB} MiB ({_TYPICAL})"
    seen = f"{free // _MIB} MiB free"
    if free < needed:
        meaning = f"too little for typical workspaces of CPU tensors, {size}; GPUs do not use it"
        remedy = "docker: --shm-size=1g; Kubernetes: an emptyDir with medium Memory on /dev/shm"
        return Finding(str(_SHM), Status.WARNING, seen, meaning, remedy)
    meaning = f"room for typical workspaces of CPU tensors, {size}; GPUs do not use it"
    return Finding(str(_SHM), Status.OK, seen, meaning)


def _typical_workspaces_bytes() -> int:
    limit = one_shot_limits(HOST_TARGET, _TYPICAL_RANKS).largest
    generation = plan.generation_bytes_for_all(_TYPICAL_RANKS, _TYPICAL_MESSAGE_BYTES, limit)
    return _TYPICAL_RANKS * NUM_GENERATIONS * generation


def memlock() -> Finding:
    """Said because other libraries fail on it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    seen = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
    meaning = "not needed: allreduce locks no host memory; MPI over InfiniBand may want more"
    return Finding("memlock limit", Status.OK, seen, meaning)


def ptrace() -> Finding:
    """Said because other libraries need it to share GPU memory."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    seen = f"yama scope {scope.read_text().strip()}" if scope.exists() else "no yama scope"
    meaning = "not needed: file descriptors travel through sockets, so no SYS_PTRACE capability"
    return Finding("ptrace rights", Status.OK, seen, meaning)


def variables() -> dict[str, str]:
    """The variables that are set and matter here."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("FLASHINFER_AR_") or name in _ECOSYSTEM_SWITCHES
    }


def environment() -> Finding:
    """Whether the variables have values that can be used, and names that anything reads."""
    topic, variables_set = "environment", variables()
    seen = ", ".join(f"{name}={value}" for name, value in variables_set.items())
    errors = [error for error in map(_error_of, (env.timeout_s, env.max_ctas)) if error]
    if errors:
        meaning = "a workspace cannot be made: it reads this variable"
        return Finding(topic, Status.FAILURE, "; ".join(errors), meaning, "set another value")
    error = _error_of(requested_targets)
    if error:
        meaning, remedy = "flashinfer-ar build refuses it", "set another value, or --arch"
        return Finding(topic, Status.WARNING, f"FLASHINFER_AR_CUDA_ARCHS: {error}", meaning, remedy)
    unknown = [
        name for name in variables_set if name not in {*_KNOWN_VARIABLES, *_ECOSYSTEM_SWITCHES}
    ]
    if unknown:
        meaning = f"nothing reads {', '.join(unknown)}"
        remedy = f"known are {', '.join(sorted(_KNOWN_VARIABLES))}"
        return Finding(topic, Status.WARNING, seen, meaning, remedy)
    return Finding(topic, Status.OK, seen or "no variable is set", "values are usable")


def _error_of(read: Callable[[], object]) -> str | None:
    try:
        read()
    except ValueError as error:
        return str(error)
    return None
