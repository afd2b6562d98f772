"""Calls that passed every check: one like them is started without asking again.

Checking five tensors in Python takes longer than launching the kernel. An engine repeats itself,
layer after layer, so a call is first compared with what passed; only what is new is checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashinfer_ar.calls import PreparedCall
from flashinfer_ar.strategy import MNNVLAllreduceFusionStrategy

_MAX_PLACES = 4096  # a model's layers times the buffers that an allocator hands out in turn


class CheckedCall:
    """A prepared call, and the tensors and numbers with which it passed.

    ``takes`` compares all that the checks depend on: the strategy, the flag, the numbers, each
    tensor's type, shape, layout, dtype and device, and the addresses of all tensors together, by
    which they are aligned and apart. A "no" may be wrong (tensors that require a gradient, another
    mode of torch than before), a "yes" never. Written out tensor by tensor: this is timed
    (benchmarks/launch_cost.py).
    """

    __slots__ = (
        "_epsilon",
        "_is_like_gamma",
        "_is_like_input",
        "_place",
        "_place_fused",
        "_places",
        "_strategy",
        "_weight_bias",
        "prepared",
        "start",
    )

    def __init__(
        self,
        prepared: PreparedCall,
        tensors: Sequence[torch.Tensor],
        numbers: tuple[float | None, float],
    ) -> None:
        self.prepared = prepared
        self.start = prepared.start
        self._place = prepared.place
        self._place_fused = prepared.place_fused
        self._strategy = prepared.shape.strategy
        self._epsilon, self._weight_bias = numbers
        self._is_like_input = _guard(tensors[0])  # all but gamma are
        self._is_like_gamma = _guard(tensors[-1])
        self._places = {_place_of(tensors)}

    def add(
        self,
        prepared: PreparedCall,
        tensors: Sequence[torch.Tensor],
        numbers: tuple[float | None, float],
    ) -> bool:
        """Remember where the tensors of another call that passed lie, if only that is new."""
        if not (
            prepared is self.prepared
            and _are_same(numbers[0], self._epsilon)
            and _are_same(numbers[1], self._weight_bias)
            and len(self._places) < _MAX_PLACES
        ):
            return False
        self._places.add(_place_of(tensors))
        return True

    def takes(
        self,
        input: torch.Tensor,
        launch_with_pdl: bool,
        output: torch.Tensor,
        strategy: MNNVLAllreduceFusionStrategy,
    ) -> bool:
        """Whether a plain call passes; if so, its tensors are in place."""
        is_like_input = self._is_like_input
        if not (
            strategy is self._strategy
            and (launch_with_pdl is True or launch_with_pdl is False)
            and is_like_input(input)
            and is_like_input(output)
        ):
            return False
        place = (input.data_ptr(), output.data_ptr())
        if place not in self._places:
            return False
        self._place(*place)
        return True

    def takes_fused(
        self,
        input: torch.Tensor,
        residual_in: torch.Tensor,
        gamma: torch.Tensor,
        epsilon: float | None,
        output: torch.Tensor,
        residual_out: torch.Tensor,
        launch_with_pdl: bool,
        strategy: MNNVLAllreduceFusionStrategy,
        weight_bias: float,
    ) -> bool:
        """Whether a fused call passes; if so, its tensors are in place, and its numbers still."""
        is_like_input = self._is_like_input
        if not (
            strategy is self._strategy
            and (launch_with_pdl is True or launch_with_pdl is False)
            and (epsilon is self._epsilon or _are_same(epsilon, self._epsilon))
            and (weight_bias is self._weight_bias or _are_same(weight_bias, self._weight_bias))
            and is_like_input(input)
            and is_like_input(residual_in)
            and self._is_like_gamma(gamma)
            and is_like_input(output)
            and is_like_input(residual_out)
        ):
            return False
        place = (
            input.data_ptr(),
            output.data_ptr(),
            residual_in.data_ptr(),
            residual_out.data_ptr(),
            gamma.data_ptr(),
        )
        if place not in self._places:
            return False
        self._place_fused(*place)
        return True


def _place_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def _are_same(number: float | None, other: float | None) -> bool:
    """Equal and of one type: ``True == 1.0``, but only one of them is allowed."""
    return number is other or (type(number) is type(other) is float and number == other)


def _guard(like: torch.Tensor) -> Callable[[object], bool]:
    """Whether another object has this tensor's type, shape, strides, dtype and device."""
    if _torch_guards_hold():
        return _torch_guard(like)
    return functools.partial(_has_traits, _traits(like))


def _torch_guard(like: torch.Tensor) -> Callable[[object], bool]:
    """What ``torch.compile`` asks before it runs what it compiled, and faster than Python can."""
    from torch._C._dynamo.guards import TensorGuards

    guards: Any = TensorGuards  # torch's own types leave out the tensors
    check: Callable[[object], bool]
    check = guards(like, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


@functools.cache
def _torch_guards_hold() -> bool:
    """Whether this torch has guards that see every difference: they have no public name."""
    like = torch.zeros(2, 8, dtype=torch.float16, device="cpu")
    across = torch.zeros(8, 2, dtype=torch.float16, device="cpu").t()
    others = (like[:1], like[0], across, like.bfloat16(), like.to("meta"), like.numpy(), None)
    try:
        is_like = _torch_guard(like)
        return is_like(like.clone()) and not any(map(is_like, others))
    except (ImportError, AttributeError, TypeError):
        return False


def _has_traits(traits: object, tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and _traits(tensor) == traits


def _traits(tensor: torch.Tensor) -> object:
    layout = tensor.layout, tensor.stride()
    return type(tensor), tensor.shape, layout, tensor.dtype, tensor.device
