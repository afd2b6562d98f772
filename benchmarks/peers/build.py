"""Builds one shared library a peer with nvcc, and keeps it until its sources change."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.peers import wheel
from benchmarks.peers.wheel import PeerError

PEERS = ("flashinfer_mnnvl", "trtllm", "vllm")

CACHE_VARIABLE = "FLASHINFER_AR_PEERS_CACHE"

# What FlashInfer itself compiles these headers with, less what only shrinks the file.
_FLAGS = (
    "-O3",
    "-DNDEBUG",
    "-std=c++17",
    "-use_fast_math",
    "--expt-relaxed-constexpr",
    "-DFLASHINFER_ENABLE_F16",
    "-DFLASHINFER_ENABLE_BF16",
    "-DFLASHINFER_ENABLE_FP8_E4M3",
    "-DFLASHINFER_ENABLE_FP8_E5M2",
    "-shared",
    "-cudart=static",
    "-Xcompiler=-fPIC",
)

_INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<(flashinfer/[^>]+)>)', re.MULTILINE)


def libraries(
    peers: Sequence[str] = PEERS, arch: str = "90a", cache: Path | None = None
) -> dict[str, Path]:
    """The library of each of ``peers`` (of PEERS), built in parallel where the cache lacks it.

    ``cache`` is by default the folder in FLASHINFER_AR_PEERS_CACHE, else
    ~/.cache/flashinfer_ar/peers. Raises PeerError if headers or nvcc are missing or a build fails.
    """
    include = wheel.include_folder()
    folder = cache or cache_folder()
    with ThreadPoolExecutor(max(1, len(peers))) as pool:
        paths = pool.map(lambda peer: _library(peer, arch, folder, include), peers)
        return dict(zip(peers, paths, strict=True))


def cache_folder() -> Path:
    """Where libraries are kept unless a call says otherwise."""
    folder = os.environ.get(CACHE_VARIABLE)
    return Path(folder) if folder else Path.home() / ".cache" / "flashinfer_ar" / "peers"


def cache_key(source: Path, flags: Sequence[str], include: Path) -> str:
    """Hex digest of ``flags`` and of ``source`` with all that it includes.

    It is the same on every machine: files count by their contents and by their paths below
    ``include`` or beside ``source``.
    """
    digest = hashlib.sha256("\0".join(flags).encode())
    for name, path in sorted(_sources(source, include).items()):
        digest.update(f"\0{name}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _library(peer: str, arch: str, folder: Path, include: Path) -> Path:
    if peer not in PEERS:
        raise ValueError(f"peer must be one of {', '.join(PEERS)}, got {peer!r}")
    source = Path(__file__).with_name(f"{peer}.cu")
    flags = (*_FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}")
    path = folder / f"{peer}-{cache_key(source, flags, include)}.so"
    if not path.exists():
        _compile(source, flags, include, path)
    return path


def _compile(source: Path, flags: Sequence[str], include: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [_nvcc(), *flags, f"-I{include}", str(source), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise PeerError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
        built.replace(path)  # whole or not at all, for whoever builds at the same time


def _nvcc() -> str:
    found = shutil.which("nvcc")
    if found is None:
        raise PeerError("nvcc is not on PATH; the peers are built with it")
    return found


def _sources(source: Path, include: Path) -> dict[str, Path]:
    """Every file that ``source`` brings, itself too; conditions do not count."""
    found: dict[str, Path] = {}
    waiting = [source.resolve()]
    while waiting:
        path = waiting.pop()
        root = include if path.is_relative_to(include) else source.resolve().parent
        name = path.relative_to(root).as_posix()
        if name in found:
            continue
        found[name] = path
        for beside, below in _INCLUDE.findall(path.read_text()):
            included = (path.parent / beside if beside else include / below).resolve()
            if included.is_file():
                waiting.append(included)
    return found
