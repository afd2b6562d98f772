"""The numerics contract as plain torch: what every kernel must return, bit for bit.

    sum          = round_T( fp32 sum over ranks 0 .. W-1, in that order, from +0.0 )
    residual_out = round_T( fp32(sum) + fp32(residual_in) )
    norm         = round_T( x * inv * (weight_bias + gamma) ), left to right, x = fp32(residual_out)
    inv          = 1 / sqrt( sum(x^2) / hidden + epsilon )

``sum(x^2)`` has one tree: the elements of each 16-byte pack by halving (0+4, 1+5, ...; then 0+2,
...); the packs of each group of 32 by halving; the groups in four chains (0, 4, 8, ...; 1, 5, ...),
and these by halving. Every operation is one fp32
operation, rounded to nearest; -0.0 in an input counts as +0.0, and every NaN has one bit pattern.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_PACK_BYTES = 16
_GROUP_PACKS = 32
_CHAINS = 4
_NAN_BITS = {torch.float32: 0x7FFFFFFF, torch.float16: 0x7FFF, torch.bfloat16: 0x7FFF}
_BITS_DTYPE = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a float tensor, as integers of the same size."""
    return tensor.view(_BITS_DTYPE[tensor.dtype])


def allreduce(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of ``inputs[rank]``, each ``[num_tokens, hidden]`` of one dtype."""
    total = torch.zeros_like(inputs[0], dtype=torch.float32)
    for contribution in inputs:
        total = total + contribution.float()
    return _rounded(total, inputs[0].dtype)


def allreduce_add_rmsnorm(
    inputs: Sequence[torch.Tensor],
    residual_in: torch.Tensor,
    gamma: torch.Tensor,
    epsilon: float,
    weight_bias: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(output, residual_out)`` of the fused call."""
    dtype = residual_in.dtype
    residual_out = _rounded(allreduce(inputs).float() + residual_in.float(), dtype)
    x = residual_out.float()
    squares = _sum_of_squares(x, dtype)
    # Divisors of full shape: torch replaces a division by one number with a multiplication.
    mean = squares / torch.full_like(squares, x.shape[1])
    # torch's fp32 square root is off by a unit in the last place now and then; fp64's, rounded, is
    # not.
    root = torch.sqrt((mean + torch.tensor(epsilon)).double()).float()
    inv = torch.ones_like(root) / root
    weight = torch.tensor(weight_bias) + gamma.float()
    return _rounded(x * inv[:, None] * weight, dtype), residual_out


def _sum_of_squares(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    per_pack = _PACK_BYTES // dtype.itemsize
    group = per_pack * _GROUP_PACKS
    squares = torch.nn.functional.pad(x * x, (0, -x.shape[1] % group))
    num_groups = squares.shape[1] // group
    packs = _by_halving(squares.view(x.shape[0], num_groups, _GROUP_PACKS, per_pack))
    groups = torch.nn.functional.pad(_by_halving(packs), (0, -num_groups % _CHAINS))
    chains = torch.zeros_like(groups[:, :_CHAINS])
    for first in range(0, groups.shape[1], _CHAINS):
        chains = chains + groups[:, first : first + _CHAINS]
    return _by_halving(chains)


def _by_halving(values: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, of a power of two: element i + n/2 to element i, and on."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values.squeeze(-1)


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rounded = values.to(dtype)
    nan = torch.tensor(_NAN_BITS[dtype], dtype=_BITS_DTYPE[dtype]).view(dtype)
    return torch.where(values.isnan(), nan, rounded)
