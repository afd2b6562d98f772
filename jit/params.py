"""The structs that Python and kernels share, as ctypes; the layout of include/.../config.cuh.

Generated sources assert size and offsets (:func:`layout_assertions`), so the two sides of a struct
cannot disagree: such a kernel does not compile. The structs end without padding, so that the size
shows a field that only one side has.
"""

from __future__ import annotations

import ctypes
import functools


class TimeoutRecord(ctypes.Structure):
    """What a kernel leaves behind whose wait outlived the deadline; valid if ``state`` is 1."""

    _fields_ = (
        ("state", ctypes.c_uint32),
        ("rank", ctypes.c_int32),
        ("peer", ctypes.c_int32),
        ("call", ctypes.c_uint32),
        ("pack", ctypes.c_uint32),
        ("epoch", ctypes.c_uint32),
    )


class Control(ctypes.Structure):
    """Device words of one rank, zero at the start."""

    _fields_ = (("epoch", ctypes.c_uint32), ("expired", ctypes.c_uint32))


class Params(ctypes.Structure):
    """The parameter block of a launch; :func:`params_type` completes it for a world size.

    Addresses are of this process; ``input`` to ``gamma`` are contiguous tensors of 16-byte packs.
    """

    input: int
    output: int
    residual_in: int
    residual_out: int
    gamma: int
    rings: ctypes.Array[ctypes.c_uint64]
    multicast: int
    control: int
    timeout_record: int
    timeout_ns: int
    generation_packs: int
    num_tokens: int
    hidden_packs: int
    rank: int
    epsilon: float
    weight_bias: float
    call: int
    release_early: int


@functools.cache
def params_type(world_size: int) -> type[Params]:
    """The parameter block for ``world_size`` ranks."""

    class SizedParams(Params):
        _fields_ = (
            ("input", ctypes.c_uint64),
            ("output", ctypes.c_uint64),
            ("residual_in", ctypes.c_uint64),
            ("residual_out", ctypes.c_uint64),
            ("gamma", ctypes.c_uint64),
            ("rings", ctypes.c_uint64 * world_size),
            ("multicast", ctypes.c_uint64),
            ("control", ctypes.c_uint64),
            ("timeout_record", ctypes.c_uint64),
            ("timeout_ns", ctypes.c_uint64),
            ("generation_packs", ctypes.c_uint64),
            ("num_tokens", ctypes.c_uint32),
            ("hidden_packs", ctypes.c_uint32),
            ("rank", ctypes.c_int32),
            ("epsilon", ctypes.c_float),
            ("weight_bias", ctypes.c_float),
            ("call", ctypes.c_uint32),
            ("release_early", ctypes.c_uint32),
        )

    return SizedParams


def layout_assertions(world_size: int) -> str:
    """``static_assert`` lines that hold exactly if the kernel's structs are laid out as these."""
    structs: tuple[tuple[str, type[ctypes.Structure]], ...] = (
        ("Kernel::Params", params_type(world_size)),
        ("TimeoutRecord", TimeoutRecord),
        ("Control", Control),
    )
    return "\n".join(_assertions(name, struct) for name, struct in structs)


def _assertions(name: str, struct: type[ctypes.Structure]) -> str:
    claims = [f"sizeof({name}) == {ctypes.sizeof(struct)}"]
    for field, *_ in struct._fields_:
        place = getattr(struct, field)
        claims.append(f"FAR_OFFSET_OF({name}, {field}) == {place.offset}")
        claims.append(f"sizeof({name}::{field}) == {place.size}")
    return "\n".join(f'static_assert({claim}, "jit/params.py disagrees");' for claim in claims)
