"""The one place where a call's arguments are checked, before any launch.

Every function raises ``TypeError`` or ``ValueError`` that names the argument, what came, and what
is allowed; nothing has been written by then.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashinfer_ar.creation import DTYPES
from flashinfer_ar.jit.spec import PACK_BYTES
from flashinfer_ar.strategy import MNNVLAllreduceFusionStrategy
from flashinfer_ar.workspace import MNNVLAllReduceFusionWorkspace

_MAX_FLOAT32 = torch.finfo(torch.float32).max
_EPSILONS = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}


def check_plain(
    input: torch.Tensor,
    workspace: MNNVLAllReduceFusionWorkspace,
    launch_with_pdl: bool,
    output: torch.Tensor | None,
    strategy: MNNVLAllreduceFusionStrategy,
) -> torch.Tensor:
    """Everything about a plain call but its size; ``output``, made if ``None``."""
    check_workspace(workspace)
    check_input(input, workspace)
    check_flag("launch_with_pdl", launch_with_pdl)
    output = check_or_make("output", output, input)
    check_apart_or_same("output", output, {"input": input})
    check_strategy(strategy)
    return output


def check_fused(
    input: torch.Tensor,
    residual_in: torch.Tensor,
    gamma: torch.Tensor,
    workspace: MNNVLAllReduceFusionWorkspace,
    epsilon: float | None,
    output: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    launch_with_pdl: bool,
    strategy: MNNVLAllreduceFusionStrategy,
    weight_bias: float,
) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Everything about a fused call but its size; outputs, epsilon and bias as they are used."""
    check_workspace(workspace)
    check_input(input, workspace)
    check_like_input("residual_in", residual_in, input)
    check_gamma("gamma", gamma, input)
    output = check_or_make("output", output, input)
    residual_out = check_or_make("residual_out", residual_out, input)
    inputs = {"input": input, "residual_in": residual_in}
    check_apart_or_same("output", output, inputs)
    check_apart_or_same("residual_out", residual_out, inputs)
    check_apart("residual_out", residual_out, {"output": output, "gamma": gamma})
    check_apart("output", output, {"gamma": gamma})
    check_flag("launch_with_pdl", launch_with_pdl)
    epsilon = check_number("epsilon", _EPSILONS[input.dtype] if epsilon is None else epsilon)
    weight_bias = check_number("weight_bias", weight_bias)
    check_strategy(strategy)
    return output, residual_out, epsilon, weight_bias


def check_workspace(workspace: object) -> MNNVLAllReduceFusionWorkspace:
    """An open workspace."""
    if not isinstance(workspace, MNNVLAllReduceFusionWorkspace):
        raise TypeError(
            f"workspace: {type(workspace).__name__}; allowed is a MNNVLAllReduceFusionWorkspace"
        )
    if not workspace.is_open:
        raise ValueError("workspace: it is closed; allowed is an open one")
    return workspace


def check_strategy(strategy: object) -> MNNVLAllreduceFusionStrategy:
    """A member of the enum."""
    if not isinstance(strategy, MNNVLAllreduceFusionStrategy):
        raise TypeError(f"strategy: {strategy!r}; allowed is a MNNVLAllreduceFusionStrategy")
    return strategy


def check_flag(name: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: {value!r}; allowed is True or False")
    return value


def check_number(name: str, value: object) -> float:
    """A number that is finite in fp32, in which kernels take it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: {value!r}; allowed is a number")
    if not abs(value) <= _MAX_FLOAT32:  # also NaN
        raise ValueError(f"{name}: {value!r}; allowed is a number that is finite in fp32")
    return float(value)


def check_input(tensor: object, workspace: MNNVLAllReduceFusionWorkspace) -> torch.Tensor:
    """``[num_tokens, hidden]`` of a supported dtype on the workspace's device."""
    checked = _tensor("input", tensor)
    if checked.dim() != 2:
        raise ValueError(f"input: shape {_shape(checked)}; allowed is [num_tokens, hidden]")
    if checked.dtype not in DTYPES:
        raise ValueError(f"input: {checked.dtype}; allowed is float32, float16 or bfloat16")
    row_bytes = checked.shape[1] * checked.itemsize
    if row_bytes == 0 or row_bytes % PACK_BYTES:
        raise ValueError(
            f"input: hidden size {checked.shape[1]} of {checked.dtype} is {row_bytes} bytes; "
            f"allowed is a multiple of {PACK_BYTES} bytes"
        )
    _check_storage("input", checked, workspace.device)
    return checked


def check_like_input(name: str, tensor: object, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the input's shape, dtype and device."""
    checked = _tensor(name, tensor)
    if checked.shape != like.shape:
        raise ValueError(f"{name}: shape {_shape(checked)}; allowed is the input's, {_shape(like)}")
    _check_dtype(name, checked, like)
    _check_storage(name, checked, like.device)
    return checked


def check_gamma(name: str, tensor: object, like: torch.Tensor) -> torch.Tensor:
    """``[hidden]`` of the input's dtype and device."""
    checked = _tensor(name, tensor)
    if checked.dim() != 1 or checked.shape[0] != like.shape[1]:
        raise ValueError(f"{name}: shape {_shape(checked)}; allowed is [{like.shape[1]}]")
    _check_dtype(name, checked, like)
    _check_storage(name, checked, like.device)
    return checked


def check_or_make(name: str, tensor: object, like: torch.Tensor) -> torch.Tensor:
    """The given output tensor, or a new one where none was given."""
    return torch.empty_like(like) if tensor is None else check_like_input(name, tensor, like)


def check_apart(name: str, tensor: torch.Tensor, others: Mapping[str, torch.Tensor]) -> None:
    """No memory in common with another output."""
    for other_name, other in others.items():
        if _overlap(tensor, other):
            raise ValueError(f"{name}: overlaps {other_name}; allowed is memory of its own")


def check_apart_or_same(
    name: str, tensor: torch.Tensor, others: Mapping[str, torch.Tensor]
) -> None:
    """In place of an input, or apart from it, but not shifted against it."""
    for other_name, other in others.items():
        if _overlap(tensor, other) and tensor.data_ptr() != other.data_ptr():
            raise ValueError(
                f"{name}: overlaps {other_name} in part; allowed is {other_name} itself or memory "
                f"apart from it"
            )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors of one device share bytes."""
    starts = one.data_ptr(), other.data_ptr()
    return starts[0] < starts[1] + other.nbytes and starts[1] < starts[0] + one.nbytes


def _tensor(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: {type(value).__name__}; allowed is a torch.Tensor")
    return value


def _check_dtype(name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    if tensor.dtype is not like.dtype:
        raise ValueError(f"{name}: {tensor.dtype}; allowed is the input's, {like.dtype}")


def _check_storage(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name}: on {tensor.device}; allowed is the workspace's device, {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: strides {tensor.stride()}; allowed is a contiguous tensor")
    if tensor.data_ptr() % PACK_BYTES:
        raise ValueError(
            f"{name}: address {tensor.data_ptr():#x}; allowed is a multiple of {PACK_BYTES} bytes"
        )


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)
