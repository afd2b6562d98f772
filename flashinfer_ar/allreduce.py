"""The calls: allreduce over the ranks of a workspace, alone or with residual add and RMSNorm."""

from __future__ import annotations

import torch

from flashinfer_ar import arguments
from flashinfer_ar.calls import CallShape
from flashinfer_ar.checked_call import CheckedCall
from flashinfer_ar.creation import DTYPES
from flashinfer_ar.jit import Epilogue
from flashinfer_ar.strategy import MNNVLAllreduceFusionStrategy
from flashinfer_ar.workspace import MNNVLAllReduceFusionWorkspace


def trtllm_mnnvl_allreduce(
    input: torch.Tensor,
    workspace: MNNVLAllReduceFusionWorkspace,
    launch_with_pdl: bool,
    output: torch.Tensor | None = None,
    strategy: MNNVLAllreduceFusionStrategy = MNNVLAllreduceFusionStrategy.AUTO,
) -> torch.Tensor:
    """Sum ``input`` over the ranks of ``workspace``, into ``output`` on every rank.

    Every rank calls it with the same shape, dtype and strategy. The sum is taken in fp32 over
    ranks 0, 1, ... in that order and rounded once, so all ranks, both strategies, every batch
    and the host's and the GPU's kernels give the same bits; a sum of zeros is +0.0.

    Args:
        input: ``[num_tokens, hidden]``, float32, float16 or bfloat16, contiguous, 16-byte aligned,
            a row a multiple of 16 bytes, on the workspace's device. Zero tokens return at once.
        workspace: an open workspace with room for the call.
        launch_with_pdl: let the kernel be launched before the previous one on the stream has
            ended (programmatic dependent launch); it waits itself before it reads ``input``.
            No effect on the host.
        output: like ``input``, or ``input`` itself; made if ``None``.
        strategy: one-shot, two-shot, or the choice of the strategy table.

    Returns:
        ``output``. On a GPU it is ready in the order of the current stream.

    Raises:
        ValueError, TypeError: a wrong argument, named; nothing was launched.
        AllReduceTimeoutError: a peer's data did not come in time, in this or, on a GPU, in an
            earlier call.

    Name and argument order are FlashInfer's.
    """
    last: CheckedCall | None = getattr(workspace, "last_plain", None)
    if (
        last is not None
        and output is not None
        and last.start(input, launch_with_pdl, output, strategy)
    ):
        return output
    output = arguments.check_plain(input, workspace, launch_with_pdl, output, strategy)
    call = workspace.prepare(_shape(input, Epilogue.NONE, strategy))
    if call is None:
        return output
    call.place(input.data_ptr(), output.data_ptr())
    workspace.remember(call, (input, output))
    call.start(launch_with_pdl)
    return output


def trtllm_mnnvl_fused_allreduce_add_rmsnorm(
    input: torch.Tensor,
    residual_in: torch.Tensor,
    gamma: torch.Tensor,
    workspace: MNNVLAllReduceFusionWorkspace,
    epsilon: float | None = None,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    launch_with_pdl: bool = False,
    strategy: MNNVLAllreduceFusionStrategy = MNNVLAllreduceFusionStrategy.AUTO,
    weight_bias: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allreduce, residual add and RMSNorm in one kernel.

    ``residual_out = sum over ranks of input + residual_in`` and ``output = residual_out /
    sqrt(mean(residual_out ** 2) + epsilon) * (weight_bias + gamma)``, each in fp32 from values of
    the tensors' dtype and rounded once; :mod:`flashinfer_ar.reference` has the exact formula.

    Args:
        input: as in :func:`trtllm_mnnvl_allreduce`; hidden size at most 131072 bytes.
        residual_in: like ``input``, equal on all ranks.
        gamma: ``[hidden]``, dtype and device of ``input``, 16-byte aligned.
        workspace: as in :func:`trtllm_mnnvl_allreduce`.
        epsilon: added to the mean square; ``torch.finfo(input.dtype).eps`` if ``None``.
        output: like ``input``, made if ``None``; may be ``input`` or ``residual_in``.
        residual_out: like ``input``, made if ``None``; may be ``input`` or ``residual_in``.
        launch_with_pdl: as in :func:`trtllm_mnnvl_allreduce`; ``gamma``, a weight, is read early.
        strategy: as in :func:`trtllm_mnnvl_allreduce`.
        weight_bias: 1.0 for Gemma, whose checkpoints store ``gamma - 1``.

    Returns:
        ``(output, residual_out)``.

    Raises as :func:`trtllm_mnnvl_allreduce`. Name and argument order are FlashInfer's.
    """
    last: CheckedCall | None = getattr(workspace, "last_fused", None)
    if (
        last is not None
        and output is not None
        and residual_out is not None
        and last.start_fused(
            input,
            residual_in,
            gamma,
            epsilon,
            output,
            residual_out,
            launch_with_pdl,
            strategy,
            weight_bias,
        )
    ):
        return output, residual_out
    numbers = epsilon, weight_bias
    output, residual_out, epsilon, weight_bias = arguments.check_fused(
        input,
        residual_in,
        gamma,
        workspace,
        epsilon,
        output,
        residual_out,
        launch_with_pdl,
        strategy,
        weight_bias,
    )
    call = workspace.prepare(_shape(input, Epilogue.ADD_RMS_NORM, strategy))
    if call is None:
        return output, residual_out
    tensors = input, output, residual_in, residual_out, gamma
    call.place(*(tensor.data_ptr() for tensor in tensors))
    call.set_numbers(epsilon, weight_bias)
    workspace.remember(call, tensors, numbers)
    call.start(launch_with_pdl)
    return output, residual_out


def _shape(
    input: torch.Tensor, epilogue: Epilogue, strategy: MNNVLAllreduceFusionStrategy
) -> CallShape:
    num_tokens, hidden_size = input.shape
    return CallShape(num_tokens, hidden_size, DTYPES[input.dtype], epilogue, strategy)
