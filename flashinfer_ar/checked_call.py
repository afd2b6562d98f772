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

    ``start`` and ``start_fused`` compare all that the checks depend on: the strategy, the flag, the
    numbers, each tensor's type, shape, layout, dtype and device, and the addresses of all tensors
    together, by which they are aligned and apart. A "no" may be wrong (a timeout before, tensors
    that require a gradient, another mode of torch, ``input`` as ``residual_in``), a "yes" never.
    Written out tensor by tensor, with every function looked up before: this is timed
    (benchmarks/launch_cost.py).
    """

    __slots__ = (
        "_are_like_input",
        "_are_like_inputs",
        "_are_like_outputs",
        "_enqueue",
        "_epsilon",
        "_is_like_input",
        "_params",
        "_places",
        "_record",
        "_strategy",
        "_weight_bias",
        "prepared",
    )

    def __init__(
        self,
        prepared: PreparedCall,
        tensors: Sequence[torch.Tensor],
        numbers: tuple[float | None, float],
    ) -> None:
        self.prepared = prepared
        self._enqueue = prepared.enqueue
        self._params = prepared.params
        self._record = prepared.record
        self._strategy = prepared.shape.strategy
        self._epsilon, self._weight_bias = numbers
        self._places = {_place_of(tensors)}
        # A guard says no to a tensor that comes twice. So in place it gets only the input, and a
        # fused call's outputs, which may be its inputs, are apart from these.
        if len(tensors) == 2:
            self._is_like_input = _guard(tensors[0])
            self._are_like_input = _guard(tensors[0], tensors[0])
        else:
            input, output, residual_in, residual_out, gamma = tensors
            self._are_like_inputs = _guard(input, residual_in, gamma)
            self._are_like_outputs = _guard(output, residual_out)

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

    def start(
        self,
        input: torch.Tensor,
        launch_with_pdl: bool,
        output: torch.Tensor,
        strategy: MNNVLAllreduceFusionStrategy,
    ) -> bool:
        """Start a plain call if it is like this one; whether it was."""
        if not (
            strategy is self._strategy
            and (launch_with_pdl is True or launch_with_pdl is False)
            and (
                self._is_like_input(input)
                if output is input
                else self._are_like_input(input, output)
            )
            and not self._record.state
        ):
            return False
        place = (input.data_ptr(), output.data_ptr())
        if place not in self._places:
            return False
        params = self._params
        params.input, params.output = place
        self._enqueue(launch_with_pdl)
        return True

    def start_fused(
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
        """Start a fused call if it is like this one, numbers too; whether it was."""
        if not (
            strategy is self._strategy
            and (launch_with_pdl is True or launch_with_pdl is False)
            and (epsilon is self._epsilon or _are_same(epsilon, self._epsilon))
            and (weight_bias is self._weight_bias or _are_same(weight_bias, self._weight_bias))
            and self._are_like_inputs(input, residual_in, gamma)
            and self._are_like_outputs(output, residual_out)
            and not self._record.state
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
        params = self._params
        (
            params.input,
            params.output,
            params.residual_in,
            params.residual_out,
            params.gamma,
        ) = place
        self._enqueue(launch_with_pdl)
        return True


def _place_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def _are_same(number: float | None, other: float | None) -> bool:
    """Equal and of one type: ``True == 1.0``, but only one of them is allowed."""
    return number is other or (type(number) is type(other) is float and number == other)


def _guard(*like: torch.Tensor) -> Callable[..., bool]:
    """Whether as many other objects have these tensors' types, shapes, strides, dtypes, devices."""
    if _torch_guards_hold():
        return _torch_guard(*like)
    return functools.partial(_have_traits, [_traits(tensor) for tensor in like])


def _torch_guard(*like: torch.Tensor) -> Callable[..., bool]:
    """What ``torch.compile`` asks before it runs what it compiled, and faster than Python can."""
    from torch._C._dynamo.guards import TensorGuards

    guards: Any = TensorGuards  # torch's own types leave out the tensors
    check: Callable[..., bool]
    check = guards(*like, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


@functools.cache
def _torch_guards_hold() -> bool:
    """Whether this torch has guards that see every difference: they have no public name."""
    like = torch.zeros(2, 8, dtype=torch.float16, device="cpu")
    row, across = like[0], torch.zeros(8, 2, dtype=torch.float16, device="cpu").t()
    others = (like[:1], like[1], across, like.bfloat16(), like.to("meta"), like.numpy(), None)
    try:
        are_like = _torch_guard(like, row)
        wrong = [(other, row) for other in others] + [(like, other) for other in others[2:]]
        return are_like(like.clone(), row.clone()) and not any(are_like(*pair) for pair in wrong)
    except (ImportError, AttributeError, TypeError):
        return False


def _have_traits(traits: Sequence[object], *tensors: object) -> bool:
    return [isinstance(each, torch.Tensor) and _traits(each) for each in tensors] == traits


def _traits(tensor: torch.Tensor) -> object:
    layout = tensor.layout, tensor.stride()
    return type(tensor), tensor.shape, layout, tensor.dtype, tensor.device
