"""What kernels are compiled with and where they are kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

import torch

from flashinfer_ar import env
from flashinfer_ar.doctor.finding import Finding, Status
from flashinfer_ar.errors import JitError
from flashinfer_ar.jit import nvrtc
from flashinfer_ar.jit.roots import home_root

_LIMIT_S = 10.0
_TRIAL = ("-std=c++20", "-fsyntax-only", "-x", "c++", os.devnull)
_TRIVIAL_KERNEL = 'extern "C" __global__ void trivial() {}'


def pytorch(wants_cuda: bool) -> Finding:
    """Whether torch can hold CUDA tensors; ``wants_cuda`` where there is a GPU."""
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"
    seen = f"{torch.__version__}, built for {built_for}"
    if torch.version.cuda:
        return Finding("PyTorch", Status.OK, seen, "CPU and CUDA tensors")
    if not wants_cuda:
        return Finding(
            "PyTorch", Status.OK, seen, "enough for CPU tensors; this machine has no GPU"
        )
    remedy = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
    return Finding("PyTorch", Status.FAILURE, seen, "there are no CUDA tensors", remedy)


def nvrtc_compiler(targets: Sequence[str], driver_cuda: tuple[int, int] | None) -> Finding:
    """Whether NVRTC compiles for ``targets`` and the driver loads what it compiles."""
    meaning = "kernels for GPUs cannot be compiled, neither at run time nor ahead of time"
    try:
        version = nvrtc.library_facts()
        for target in targets:
            nvrtc.compile_ptx(_TRIVIAL_KERNEL, target)
    except JitError as error:
        seen, _, remedy = str(error).partition("; install it with: ")
        remedy = remedy.partition("; loading")[0] or "install a newer nvidia-cuda-nvrtc"
        return Finding("NVRTC", Status.FAILURE, seen, meaning, remedy)
    seen = f"{version[0]}.{version[1]}, compiles for {', '.join(targets)}"
    if driver_cuda is not None and version[0] > driver_cuda[0]:
        seen += f"; the driver is for CUDA {driver_cuda[0]}.{driver_cuda[1]}"
        meaning = "the driver refuses to load kernels of a newer major version of CUDA"
        remedy = f"a newer driver, or pip install nvidia-cuda-nvrtc-cu{driver_cuda[0]}"
        return Finding("NVRTC", Status.FAILURE, seen, meaning, remedy)
    return Finding("NVRTC", Status.OK, seen, "kernels for GPUs can be compiled; nvcc is not needed")


def host_compiler() -> Finding:
    """Whether there is a C++20 compiler for the CPU kernels."""
    topic, meaning = "host compiler", "allreduce of CPU tensors cannot compile its kernels"
    remedy = (
        "install g++ 11 or newer (Debian and Ubuntu: apt-get install g++), or name one in "
        "FLASHINFER_AR_CXX"
    )
    wanted = env.host_compiler()
    found = shutil.which(wanted)
    if found is None:
        return Finding(topic, Status.FAILURE, f"no {wanted!r} on PATH", meaning, remedy)
    try:
        version = _output(found, "--version").partition("\n")[0]
        _output(found, *_TRIAL)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(topic, Status.FAILURE, f"{found}: {error}", meaning, remedy)
    seen = f"{found}: {version}"
    return Finding(topic, Status.OK, seen, "kernels for CPU tensors can be compiled")


def _output(*command: str) -> str:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=_LIMIT_S,
        check=True,
        text=True,
        errors="replace",
    ).stdout


def cache_folder() -> Finding:
    """Whether compiled kernels can be kept where only trusted users write."""
    topic = "kernel cache"
    try:
        root = home_root()
        with tempfile.TemporaryFile(dir=root):
            pass
        num_kernels = sum(path.is_dir() and path.name[0] != "." for path in root.iterdir())
    except OSError as error:
        meaning = "kernels go to a temporary folder of this machine and are compiled again later"
        remedy = "name a folder of your own, or a read-write one, in FLASHINFER_AR_CACHE_DIR"
        return Finding(topic, Status.WARNING, str(error), meaning, remedy)
    seen = f"{root}: {num_kernels} kernels, writable, not open to every user"
    return Finding(topic, Status.OK, seen, "each kernel is compiled once")
