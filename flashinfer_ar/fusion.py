"""FlashInfer's unified entry points: one function that makes a workspace, one for every pattern."""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING

import torch

from flashinfer_ar.allreduce import (
    trtllm_mnnvl_allreduce,
    trtllm_mnnvl_fused_allreduce_add_rmsnorm,
)
from flashinfer_ar.bootstrap import CommBackend, TorchDistBackend
from flashinfer_ar.jit.spec import MAX_WORLD_SIZE
from flashinfer_ar.mapping import Mapping
from flashinfer_ar.strategy import strategy_of
from flashinfer_ar.workspace import MNNVLAllReduceFusionWorkspace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_BACKENDS = ("auto", "mnnvl")


class AllReduceFusionPattern(enum.IntEnum):
    """What :func:`allreduce_fusion` computes: FlashInfer's names and codes, supported or not."""

    kAllReduce = 0
    kARResidualRMSNorm = 1
    kARResidualRMSNormFP8Quant = 2
    kARResidualRMSNormFP4Quant = 3
    kARResidualRMSNormOutFP8Quant = 4
    kARResidualRMSNormOutFP4Quant = 5
    kMoEReductionARResidualRMSNorm = 6
    kMoEFinalizeARResidualRMSNorm = 7
    kARResidualRMSNormPerTokenGroupFP8PackedQuant = 8
    kARResidualRMSNormOutPerTokenGroupFP8PackedQuant = 9
    kARResidualRMSNormDynamicFP8Quant = 10
    kARResidualRMSNormOutDynamicFP8Quant = 11


class QuantizationSFLayout(enum.IntEnum):
    """Layouts of block scale factors: FlashInfer's names and codes, which engines pass along."""

    SWIZZLED_128x4 = 0
    SWIZZLED_8x4 = 1
    LINEAR = 2


_PLAIN = AllReduceFusionPattern.kAllReduce
_ADD_RMS_NORM = AllReduceFusionPattern.kARResidualRMSNorm
# Of FlashInfer's TensorRT-LLM back end alone, so not even to come.
_TRTLLM_ONLY = range(6, 10)


def create_allreduce_fusion_workspace(
    backend: str = "auto",
    world_size: int | None = None,
    rank: int | None = None,
    max_token_num: int | None = None,
    hidden_dim: int | None = None,
    dtype: torch.dtype | None = None,
    gpus_per_node: int | None = None,
    comm_backend: CommBackend | None = None,
    force_oneshot_support: bool = False,
    group: ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
) -> MNNVLAllReduceFusionWorkspace:
    """The workspace of a tensor-parallel group of ``world_size`` ranks; collective.

    Args:
        backend: ``"auto"`` or ``"mnnvl"``, which mean the same here.
        world_size: ranks of the group, 1 to 72. This and the next four must be given.
        rank: this rank's place in the group.
        max_token_num: tokens of the largest call.
        hidden_dim: hidden size of that call.
        dtype: dtype of that call: float32, float16 or bfloat16.
        gpus_per_node: default: the visible GPUs, ``world_size`` at most.
        comm_backend: how the ranks meet; wins over ``group``.
        force_oneshot_support: make room for one-shot calls of ``max_token_num`` too.
        group: a torch.distributed group of these ranks. Without it and ``comm_backend``: the world
            of torch.distributed or of MPI, whichever has ``world_size`` ranks.
        device: where the tensors live. Default: the current CUDA device, without one the CPU.

    Raises as :class:`~flashinfer_ar.workspace.MNNVLAllReduceFusionWorkspace`. Names, order and
    defaults of the arguments before ``device`` are FlashInfer's.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r}: allowed is 'auto' or 'mnnvl'")
    _require_given(
        world_size=world_size,
        rank=rank,
        max_token_num=max_token_num,
        hidden_dim=hidden_dim,
        dtype=dtype,
    )
    assert world_size is not None and rank is not None and max_token_num is not None
    _require_size("world_size", world_size, MAX_WORLD_SIZE)
    _require_size("max_token_num", max_token_num)
    if gpus_per_node is None:
        gpus_per_node = min(torch.cuda.device_count() or world_size, world_size)
    if comm_backend is None and group is not None:
        comm_backend = TorchDistBackend(group)
    return MNNVLAllReduceFusionWorkspace(
        Mapping(world_size, rank, gpus_per_node, tp_size=world_size),
        max_token_num,
        hidden_dim,
        dtype,
        comm_backend=comm_backend,
        device=device,
        force_oneshot_support=force_oneshot_support,
    )


def allreduce_fusion(
    input: torch.Tensor,
    workspace: MNNVLAllReduceFusionWorkspace,
    pattern: int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_in: torch.Tensor | None = None,
    rms_gamma: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    scale_factor: torch.Tensor | float | None = None,
    layout_code: int | None = None,
    use_oneshot: bool | None = None,
    fp32_acc: bool = False,
    moe_reduction_device_num_experts: int | None = None,
    moe_reduction_scale_input: torch.Tensor | None = None,
    moe_reduction_active_experts_token_input: torch.Tensor | None = None,
    moe_reduction_token_input: torch.Tensor | None = None,
    expanded_idx_to_permuted_idx: torch.Tensor | None = None,
    expert_scale_factor: torch.Tensor | None = None,
    shared_expert_output: torch.Tensor | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float = 0.0,
) -> torch.Tensor:
    """Allreduce, alone (pattern 0) or with residual add and RMSNorm (pattern 1).

    Numerics and rules for tensors: :func:`~flashinfer_ar.allreduce.trtllm_mnnvl_allreduce` and
    :func:`~flashinfer_ar.allreduce.trtllm_mnnvl_fused_allreduce_add_rmsnorm`.

    Args:
        input: ``[num_tokens, hidden]``, float32, float16 or bfloat16.
        workspace: an open workspace with room for the call.
        pattern: ``kAllReduce`` or ``kARResidualRMSNorm`` of :class:`AllReduceFusionPattern`, or
            its code.
        launch_with_pdl: programmatic dependent launch of this call.
        trigger_completion_at_end: ignored; the next kernel is let go after the last store.
        output: pattern 0: the sum, like ``input``; made if ``None``.
        residual_out: pattern 1: the sum plus ``residual_in``, like ``input``; made if ``None``.
        norm_out: pattern 1: the normalized ``residual_out``, like ``input``; made if ``None``.
        quant_out: of patterns that are not supported yet: ``None``.
        scale_out: as ``quant_out``.
        residual_in: pattern 1: like ``input``; required.
        rms_gamma: pattern 1: ``[hidden]``, dtype of ``input``; required.
        rms_eps: pattern 1: added to the mean square.
        scale_factor: ignored (quantization).
        layout_code: ignored (quantization); a :class:`QuantizationSFLayout`.
        use_oneshot: force one-shot or two-shot; ``None`` leaves it to the strategy table.
        fp32_acc: ignored; sums are always taken in fp32.
        moe_reduction_device_num_experts: ignored (MoE), as the next six.
        moe_reduction_scale_input: ignored.
        moe_reduction_active_experts_token_input: ignored.
        moe_reduction_token_input: ignored.
        expanded_idx_to_permuted_idx: ignored.
        expert_scale_factor: ignored.
        shared_expert_output: ignored.
        block_quant_group_size: ignored (quantization).
        weight_bias: pattern 1: added to ``rms_gamma``; 1.0 for Gemma.

    What is ignored is accepted because engines pass it whatever the pattern is; it concerns
    patterns that are refused here, or FlashInfer's TensorRT-LLM kernels alone.

    Returns:
        ``output`` (pattern 0) or ``norm_out`` (pattern 1).

    Raises:
        ValueError, TypeError: a wrong argument, named, and also a tensor of another pattern, which
            would be left unread or unwritten; nothing was launched.
        AllReduceTimeoutError: as the functions above.

    Names, order and defaults are FlashInfer's.
    """
    if pattern == _PLAIN:
        _require_absent(
            _PLAIN,
            residual_out=residual_out,
            norm_out=norm_out,
            quant_out=quant_out,
            scale_out=scale_out,
            residual_in=residual_in,
            rms_gamma=rms_gamma,
        )
        strategy = strategy_of(use_oneshot)
        return trtllm_mnnvl_allreduce(input, workspace, launch_with_pdl, output, strategy)
    if pattern != _ADD_RMS_NORM:
        raise _unsupported(pattern)
    _require_absent(_ADD_RMS_NORM, output=output, quant_out=quant_out, scale_out=scale_out)
    _require_given(residual_in=residual_in, rms_gamma=rms_gamma)
    assert residual_in is not None and rms_gamma is not None
    try:
        norm_out, _ = trtllm_mnnvl_fused_allreduce_add_rmsnorm(
            input,
            residual_in,
            rms_gamma,
            workspace,
            epsilon=rms_eps,
            output=norm_out,
            residual_out=residual_out,
            launch_with_pdl=launch_with_pdl,
            strategy=strategy_of(use_oneshot),
            weight_bias=weight_bias,
        )
    except (ValueError, TypeError) as error:
        raise type(error)(_with_names_of_fusion(str(error))) from None
    return norm_out


def _with_names_of_fusion(message: str) -> str:
    """The message of a refused argument, with the names that the caller used."""
    names = {"gamma": "rms_gamma", "epsilon": "rms_eps", "output": "norm_out"}
    return re.sub(r"\b(gamma|epsilon|output)\b", lambda found: names[found[0]], message)


def _require_given(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is None:
            raise ValueError(f"{name}: None; it must be given")


def _require_absent(pattern: AllReduceFusionPattern, **arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name}: given; allowed with pattern {_shown(pattern)} is None")


def _require_size(name: str, value: object, most: int | None = None) -> None:
    if not isinstance(value, int) or value < 1 or (most is not None and value > most):
        allowed = "a whole number from 1" if most is None else f"1 to {most}"
        raise ValueError(f"{name}={value!r}: allowed is {allowed}")


def _unsupported(pattern: object) -> ValueError:
    allowed = f"allowed is {_shown(_PLAIN)} or {_shown(_ADD_RMS_NORM)}"
    try:
        known = AllReduceFusionPattern(pattern)  # type: ignore[arg-type]
    except ValueError:
        return ValueError(f"pattern={pattern!r}: {allowed}")
    yet = "" if known in _TRTLLM_ONLY else " yet"
    return ValueError(f"pattern={_shown(known)} is not supported{yet}: {allowed}")


def _shown(pattern: AllReduceFusionPattern) -> str:
    return f"{pattern.name} ({pattern.value})"
