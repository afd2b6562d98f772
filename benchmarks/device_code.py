"""The benchmark's own kernels: the feeder, an empty kernel, and a copy; and how to launch them."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from cuda.bindings import driver

from benchmarks.contender import Copy, Feed
from flashinfer_ar.driver import checked
from flashinfer_ar.jit import nvrtc
from flashinfer_ar.launch.cuda import cluster_attribute, pdl_attribute

FEEDER_CTAS, FEEDER_THREADS = 132, 256

_SOURCE = """
#define WAIT asm volatile("griddepcontrol.wait;" ::: "memory")
#define RELEASE asm volatile("griddepcontrol.launch_dependents;" ::: "memory")

struct Copy {
  const char* source;
  long long source_pitch, offset, pitch, row_bytes, rows;
};

struct FeederParams {
  const Copy* copies;
  char* base;
  const unsigned* generation_word;
  long long generation_bytes;
  int shift, num_generations;
};

// One 16-byte pack a thread and turn; each copy has CTAs of its own.
extern "C" __global__ void feeder(const __grid_constant__ FeederParams params) {
  WAIT;
  const unsigned call = *reinterpret_cast<const volatile unsigned*>(params.generation_word);
  char* generation = params.base + (call >> params.shift) % params.num_generations *
                                       params.generation_bytes;
  const Copy copy = params.copies[blockIdx.y];
  const unsigned row_packs = copy.row_bytes / 16, packs = row_packs * copy.rows;
  for (unsigned p = blockIdx.x * blockDim.x + threadIdx.x; p < packs; p += gridDim.x * blockDim.x) {
    const long long row = p / row_packs, in_row = p % row_packs * 16ll;
    *reinterpret_cast<uint4*>(generation + copy.offset + row * copy.pitch + in_row) =
        *reinterpret_cast<const uint4*>(copy.source + row * copy.source_pitch + in_row);
  }
  RELEASE;
}

extern "C" __global__ void empty() {
  WAIT;
  RELEASE;
}
"""


class _Copy(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("source", "source_pitch", "offset", "pitch", "row_bytes", "rows")
    )


class _FeederParams(ctypes.Structure):
    _fields_ = (
        ("copies", ctypes.c_uint64),
        ("base", ctypes.c_uint64),
        ("generation_word", ctypes.c_uint64),
        ("generation_bytes", ctypes.c_int64),
        ("shift", ctypes.c_int32),
        ("num_generations", ctypes.c_int32),
    )


class DeviceCode:
    """The kernels above, loaded into torch's context of the current device (sm_90)."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")  # makes the context current
        cubin = nvrtc.build_cubin("side_by_side", _SOURCE, "sm_90a")
        self._module = checked(driver.cuModuleLoadData, cubin.read_bytes())
        self._feeder = checked(driver.cuModuleGetFunction, self._module, b"feeder")
        self._empty = checked(driver.cuModuleGetFunction, self._module, b"empty")

    def launch_empty(self, stream: int, ctas: int, threads: int, cluster: int) -> None:
        """A kernel that does nothing, with PDL."""
        _launch(self._empty, stream, (ctas, 1), threads, cluster, None)

    def launch_feeder(self, stream: int, feed: StagedFeed) -> None:
        """Write a feed into rank 0's memory."""
        grid = -(-FEEDER_CTAS // feed.num_copies), feed.num_copies
        _launch(self._feeder, stream, grid, FEEDER_THREADS, 1, feed.params)


class StagedFeed:
    """A feed with its list of copies on the device."""

    def __init__(self, feed: Feed) -> None:
        packed = [_packed(copy) for copy in feed.copies] or [_Copy(row_bytes=16)]  # of no rows
        self.num_copies = len(packed)
        copies = (_Copy * self.num_copies)(*packed)
        self._copies = torch.frombuffer(bytearray(copies), dtype=torch.uint8).cuda()
        self.params = _FeederParams(
            copies=self._copies.data_ptr(),
            base=feed.base,
            generation_word=feed.generation_word,
            generation_bytes=feed.generation_bytes,
            shift=feed.shift,
            num_generations=feed.num_generations,
        )


def _packed(copy: Copy) -> _Copy:
    return _Copy(copy.source, copy.source_pitch, copy.offset, copy.pitch, copy.row_bytes, copy.rows)


def _launch(
    function: Any,
    stream: int,
    grid: tuple[int, int],
    threads: int,
    cluster: int,
    params: ctypes.Structure | None,
) -> None:
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.hStream = stream
    config.attrs = [pdl_attribute(), cluster_attribute(cluster)]
    config.numAttrs = 2
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params) if params is not None else None)
    checked(driver.cuLaunchKernelEx, config, function, ctypes.addressof(pointers), 0)
