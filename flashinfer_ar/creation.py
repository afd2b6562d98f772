"""What a workspace's constructor checks and chooses."""

from __future__ import annotations

import torch

from flashinfer_ar.bootstrap import CommBackend, default_comm_backend
from flashinfer_ar.jit import DType
from flashinfer_ar.jit.spec import MAX_WORLD_SIZE
from flashinfer_ar.launch import Substrate
from flashinfer_ar.mapping import Mapping

DTYPES = {
    torch.float32: DType.FLOAT32,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
}


def supported(dtype: torch.dtype) -> DType:
    """The kernels' name of a dtype; ``ValueError`` if they have none."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype}: allowed is float32, float16 or bfloat16")
    return DTYPES[dtype]


def require_device(device: torch.device | str | None) -> None:
    """``ValueError`` for a device of a kind that no substrate has."""
    if device is not None and torch.device(device).type not in ("cpu", "cuda"):
        raise ValueError(f"device={device}: allowed is a CPU or CUDA device")


def device_of(device: torch.device | str | None) -> torch.device:
    """The device as tensors name it: ``cuda`` with its index, ``cpu`` without one."""
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cpu":
        return torch.device("cpu")
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    return torch.device("cuda", index)


def require_arguments(
    mapping: Mapping,
    max_num_tokens: int | None,
    hidden_dim: int | None,
    dtype: torch.dtype | None,
    buffer_size_in_bytes: int | None,
) -> None:
    """``ValueError`` or ``TypeError`` for arguments that are wrong on any machine."""
    if not isinstance(mapping, Mapping):
        raise TypeError(f"mapping: {type(mapping).__name__}; allowed is a Mapping")
    if mapping.tp_size > MAX_WORLD_SIZE:
        raise ValueError(f"mapping.tp_size={mapping.tp_size}: allowed is 1 to {MAX_WORLD_SIZE}")
    sizes = {
        "max_num_tokens": max_num_tokens,
        "hidden_dim": hidden_dim,
        "buffer_size_in_bytes": buffer_size_in_bytes,
    }
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ValueError(f"{name}={size!r}: allowed is a whole number from 1")
    per_pack = 1 if dtype is None else supported(dtype).per_pack
    if hidden_dim is not None and hidden_dim % per_pack:
        raise ValueError(f"hidden_dim={hidden_dim}: allowed is a multiple of 16 bytes of {dtype}")
    if buffer_size_in_bytes is None and None in (max_num_tokens, hidden_dim, dtype):
        raise ValueError(
            "max_num_tokens, hidden_dim, dtype: allowed is all three, or buffer_size_in_bytes alone"
        )


def tensor_parallel_group(mapping: Mapping, comm: CommBackend | None) -> CommBackend:
    """The group of ``mapping.tp_group``, split off the world if ``comm`` is that; collective."""
    if comm is None:
        comm = default_comm_backend(mapping.world_size)
    if comm.Get_size() == mapping.world_size and mapping.tp_size < mapping.world_size:
        comm = comm.Split(mapping.rank // mapping.tp_size, mapping.tp_rank)
    place = (comm.Get_rank(), comm.Get_size())
    if place != (mapping.tp_rank, mapping.tp_size):
        raise ValueError(
            f"comm_backend: rank {place[0]} of {place[1]}; allowed is rank {mapping.tp_rank} of "
            f"{mapping.tp_size} (mapping.tp_rank and tp_size), or the whole world"
        )
    return comm


def ranks_on_device(comm: CommBackend, substrate: Substrate) -> int:
    """The most ranks of the group that share one device."""
    identities = comm.allgather(substrate.device_identity)
    return max(1 if each is None else identities.count(each) for each in identities)
