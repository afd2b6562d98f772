"""How long kernels take to be built, found and loaded; beside them, how long a peer's module takes.

Each of our times comes from a fresh process with a cache folder of its own. On a machine with a GPU
a kernel counts as ready when the driver has loaded it, else when its binary is there. The peers'
modules are compiled by nvcc with the flags of FlashInfer's own JIT, from the files of its wheel;
their loading is not counted, nor is FlashInfer's import.

    python benchmarks/jit_times.py --peers mnnvl

Files of the peers come from the installed packages flashinfer-python and apache-tvm-ffi, or from
FLASHINFER_AR_PEERS: a folder with flashinfer/data/{csrc,include,spdlog} and tvm_ffi/include.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
HIDDEN = 7168
PROCESS_LIMIT_S, PEER_LIMIT_S = 120.0, 540.0
NO_LIMIT = 1000  # kernels
FIRST = "first kernel, empty cache"

# Modules of FlashInfer, as its jit/comm.py has them.
PEERS = {
    "mnnvl": ("trtllm_mnnvl_allreduce.cu",),
    "vllm": ("vllm_custom_all_reduce.cu",),
    "trtllm": (
        "trtllm_allreduce.cu",
        "trtllm_allreduce_fusion.cu",
        "trtllm_moe_allreduce_fusion.cu",
    ),
}


# ---- One process ---------------------------------------------------------------------------------


def measure(kind: str, world_size: int, most: int) -> dict[str, Any]:
    """In this process, seconds of imports and of kernels; ``kind`` is a key of ``MEASURES``."""
    start = time.perf_counter()
    importlib.import_module("torch")
    after_torch = time.perf_counter()
    from flashinfer_ar import jit
    from flashinfer_ar.instances import Instances
    from flashinfer_ar.jit import nvrtc

    importlib.import_module("cuda.bindings.driver")  # as the package does for CUDA tensors
    imported = time.perf_counter()
    load, target = _loader()
    of_rank = Instances(target, world_size, 0, HIDDEN, jit.DType.BFLOAT16, False)
    # First what a server calls most: the kernel of the workspace's own shape.
    specs = sorted(of_rank.ahead(), key=lambda spec: spec.hidden_size is None)[:most]
    if kind == "warm":
        nvrtc._compile = _refuse
    kernels = MEASURES[kind](jit, specs, load)
    return {
        "torch": after_torch - start,
        "own_imports": imported - after_torch,
        "kernels": kernels,
        "nvrtc_loaded": "libnvrtc.so" in Path("/proc/self/maps").read_text(),
        "binary_bytes": [path.stat().st_size for path in jit.build_all(specs)],
    }


def _one_by_one(jit: Any, specs: Sequence[Any], load: Callable[[Path, str], None]) -> list[float]:
    seconds = []
    for spec in specs:
        start = time.perf_counter()
        load(jit.build(spec), spec.name)
        seconds.append(time.perf_counter() - start)
    return seconds


def _all_at_once(jit: Any, specs: Sequence[Any], load: Callable[[Path, str], None]) -> list[float]:
    """One number: all that a workspace loads when it is made."""
    start = time.perf_counter()
    for spec, path in zip(specs, jit.build_all(specs), strict=True):
        load(path, spec.name)
    return [time.perf_counter() - start]


MEASURES = {"each": _one_by_one, "all": _all_at_once, "warm": _one_by_one, "warm all": _all_at_once}


def _loader() -> tuple[Callable[[Path, str], None], str]:
    """What loads a binary into the device, with a context made; and the device's target."""
    import torch

    if not torch.cuda.is_available():
        return (lambda path, name: None), "sm_90a"
    from cuda.bindings import driver

    from flashinfer_ar.driver import checked
    from flashinfer_ar.jit.nvrtc import target_of_device

    torch.zeros(1, device="cuda")  # makes the context current

    def load(path: Path, name: str) -> None:
        module = checked(driver.cuModuleLoadData, path.read_bytes())
        checked(driver.cuModuleGetFunction, module, name.encode())

    return load, target_of_device(*torch.cuda.get_device_capability())


def _refuse(*arguments: object) -> NoReturn:
    raise SystemExit("a warm start ran the compiler")


# ---- Many processes ------------------------------------------------------------------------------


def in_fresh_process(cache: Path, kind: str, world_size: int, most: int) -> dict[str, Any]:
    """:func:`measure` in a new interpreter; SystemExit with its output if that fails."""
    done = subprocess.run(
        [sys.executable, __file__, "--measure", kind, str(world_size), str(most)],
        env=os.environ | {"FLASHINFER_AR_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"measuring {kind!r} failed:\n{done.stdout}{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def our_times(rounds: int) -> dict[str, tuple[Sequence[float], str]]:
    """The rows of the table: seconds of each round or kernel, and the target if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        caches = (Path(folder, str(i)) for i in range(1000))  # each empty
        first = [in_fresh_process(next(caches), "each", 8, 1) for _ in range(rounds)]
        few = [in_fresh_process(next(caches), "each", world_size, 4) for world_size in (2, 4)]
        at_once = in_fresh_process(next(caches), "all", 8, NO_LIMIT)
        full = next(caches)
        each = in_fresh_process(full, "each", 8, NO_LIMIT)
        warm = [in_fresh_process(full, "warm", 8, NO_LIMIT) for _ in range(rounds)]
        warm_all = [in_fresh_process(full, "warm all", 8, NO_LIMIT) for _ in range(rounds)]
    num, cores = len(each["kernels"]), len(os.sched_getaffinity(0))
    further = [seconds for process in few for seconds in process["kernels"][1:]]
    loaded = [process["nvrtc_loaded"] for process in (*warm, *warm_all)]
    print(
        f"a warm start ran no compiler; it loaded NVRTC in {sum(loaded)} of {len(loaded)} processes"
        f"\na kernel's binary: {statistics.median(each['binary_bytes']) / 1024:.0f} KiB (median)"
    )
    return {
        "import torch": ([process["torch"] for process in first], ""),
        "import the rest": ([process["own_imports"] for process in first], ""),
        FIRST: ([process["kernels"][0] for process in first], "1 s"),
        "each further kernel, 8 ranks": (each["kernels"][1:], "0.15 s"),
        "each further kernel, 2 and 4 ranks": (further, "0.15 s"),
        f"all {num} kernels, one by one": ([sum(each["kernels"])], ""),
        f"all {num} kernels, build_all, {cores} cores": (at_once["kernels"], ""),
        "warm: first kernel": ([process["kernels"][0] for process in warm], "0.02 s"),
        "warm: each further kernel": ([s for process in warm for s in process["kernels"][1:]], ""),
        f"warm: all {num} kernels": ([process["kernels"][0] for process in warm_all], ""),
    }


# ---- Peers ---------------------------------------------------------------------------------------


def peer_seconds(peer: str) -> float:
    """Seconds to compile and link one module; SystemExit with nvcc's output if that fails."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise SystemExit("nvcc is not on PATH; --peers none leaves the peers out")
    flags, sources = _peer_flags(Path(nvcc)), _package("flashinfer") / "data" / "csrc"
    with tempfile.TemporaryDirectory() as folder:
        objects = [Path(folder, f"{name}.o") for name in PEERS[peer]]
        commands = [
            [nvcc, *flags, "-c", str(sources / name), "-o", str(made)]
            for name, made in zip(PEERS[peer], objects, strict=True)
        ]
        start = time.perf_counter()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # as many as ninja starts
            list(pool.map(_run, commands))
        # Without -lcuda, which a machine without a driver lacks.
        cudart = [f"-L{_toolkit(Path(nvcc)) / 'lib64'}", "-lcudart"]
        _run(["c++", *map(str, objects), "-shared", *cudart, "-o", str(Path(folder, "peer.so"))])
        return time.perf_counter() - start


def _peer_flags(nvcc: Path) -> list[str]:
    """Those of FlashInfer's jit/{core,cpp_ext,comm}.py for an H200, with the toolkit's own CCCL."""
    import torch

    data = _package("flashinfer") / "data"
    system = [
        Path(sysconfig.get_path("include")),
        _toolkit(nvcc) / "include",
        _package("tvm_ffi") / "include",
        data / "include",
        data / "csrc",
        data / "spdlog" / "include",
    ]
    elements = ("F16", "BF16", "FP8_E4M3", "FP8_E5M2", "FP8_E8M0", "FP4_E2M1")
    return [
        "-DPy_LIMITED_API=0x03090000",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(flag for folder in system for flag in ("-isystem", str(folder))),
        "--compiler-options=-fPIC",
        "--expt-relaxed-constexpr",
        "-static-global-template-stub=false",
        "-std=c++17",
        "--threads=1",
        "-use_fast_math",
        "-Xfatbin=-compress-all",
        "--compress-mode=size",
        "-DNDEBUG",
        "-O3",
        *(f"-DFLASHINFER_ENABLE_{element}" for element in elements),
        "-gencode=arch=compute_90a,code=sm_90a",
    ]


def _toolkit(nvcc: Path) -> Path:
    """The folder of the CUDA toolkit, also where the ``nvcc`` on PATH is a script."""
    shown = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False
    )
    tops = [line.partition("TOP=")[2] for line in shown.stderr.splitlines() if " TOP=" in line]
    return Path(tops[0]) if tops else nvcc.resolve().parents[1]


def _package(name: str) -> Path:
    unpacked = os.environ.get("FLASHINFER_AR_PEERS")
    if unpacked:
        return Path(unpacked).resolve() / name
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(
            "the peers' files are not here: pip install --no-deps flashinfer-python apache-tvm-ffi,"
            " or set FLASHINFER_AR_PEERS; --peers none leaves the peers out"
        )
    return Path(next(iter(found.submodule_search_locations)))


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PEER_LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


# ---- Report --------------------------------------------------------------------------------------


def report(rows: Mapping[str, tuple[Sequence[float], str]]) -> str:
    lines = [f"{'seconds':40} {'median':>8} {'least':>8} {'most':>8} {'of':>4}  target"]
    for what, (seconds, target) in rows.items():
        median = statistics.median(seconds)
        lines.append(
            f"{what:40} {median:8.4f} {min(seconds):8.4f} {max(seconds):8.4f} {len(seconds):4}"
            f"  {target and 'under ' + target}"
        )
    return "\n".join(lines)


def described_machine() -> str:
    import torch

    from flashinfer_ar.jit import nvrtc

    major, minor, _ = nvrtc.library_facts()
    cores = f"{len(os.sched_getaffinity(0))} cores, NVRTC {major}.{minor}"
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {cores}; a kernel is ready when it is loaded"
    return f"no GPU, {cores}; a kernel is ready when its binary is there: loading is left out"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", choices=["none", "mnnvl", "all"], default="mnnvl")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if chosen.measure:
        kind, world_size, most = chosen.measure
        print(json.dumps(measure(kind, int(world_size), int(most))))
        return 0
    rows = our_times(chosen.rounds)
    first = statistics.median(rows[FIRST][0])
    peers = {"none": [], "mnnvl": ["mnnvl"], "all": [*PEERS]}[chosen.peers]
    times = {peer: peer_seconds(peer) for peer in peers}
    print(f"{described_machine()}\n{report(rows)}")
    for peer, seconds in times.items():
        print(
            f"FlashInfer's module {peer}: {seconds:.1f} s to compile and link, "
            f"{seconds / first:.0f} x the time to our first kernel"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
