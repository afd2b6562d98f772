"""FlashInfer's unified entry points, called as engines call them (in-process ranks, host)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Call, random_call

import flashinfer_ar as far
from flashinfer_ar import fusion, reference

Pattern = far.AllReduceFusionPattern
WORLD_SIZE = 2
TOKENS, HIDDEN = 3, 64
SHAPE = {
    "world_size": WORLD_SIZE,
    "rank": 0,
    "max_token_num": TOKENS,
    "hidden_dim": HIDDEN,
    "dtype": torch.bfloat16,
}
CALL = random_call(WORLD_SIZE, TOKENS, HIDDEN, torch.bfloat16, fused=True, epsilon=1e-6)


def on_ranks(body: Callable[..., Any], **arguments: Any) -> list[Any]:
    """``body(workspace, input, residual)`` on every rank, with tensors that it may overwrite."""

    def rank_main(comm: far.InProcessBackend) -> Any:
        rank = comm.Get_rank()
        given = {**SHAPE, "rank": rank, "comm_backend": comm, "device": "cpu", **arguments}
        with far.create_allreduce_fusion_workspace(**given) as workspace:
            return body(workspace, CALL.inputs[rank].clone(), CALL.residual.clone())

    return far.run_ranks(WORLD_SIZE, rank_main)


def assert_bits(
    results: list[tuple[torch.Tensor, ...]], expected: tuple[torch.Tensor, ...]
) -> None:
    for outputs in results:
        for have, due in zip(outputs, expected, strict=True):
            assert torch.equal(reference.bits(have), reference.bits(due))


# ---- Patterns ---------------------------------------------------------------------------------


@pytest.mark.parametrize("use_oneshot", [None, True, False])
@pytest.mark.parametrize("pattern", [Pattern.kAllReduce, 0])
def test_plain(pattern: int, use_oneshot: bool | None) -> None:
    def body(workspace, x, residual):
        return (far.allreduce_fusion(x, workspace, pattern, use_oneshot=use_oneshot),)

    assert_bits(on_ranks(body, max_token_num=64), Call(CALL.inputs).expected())


@pytest.mark.parametrize("use_oneshot", [None, True, False])
@pytest.mark.parametrize("pattern", [Pattern.kARResidualRMSNorm, 1])
def test_add_rms_norm(pattern: int, use_oneshot: bool | None) -> None:
    def body(workspace, x, residual):
        residual_out = torch.empty_like(x)
        norm_out = far.allreduce_fusion(
            x, workspace, pattern, residual_in=residual, rms_gamma=CALL.gamma,
            residual_out=residual_out, use_oneshot=use_oneshot,
        )  # fmt: skip
        return norm_out, residual_out

    assert_bits(on_ranks(body, max_token_num=64), CALL.expected())


def test_what_is_returned() -> None:
    def body(workspace, x, residual):
        inputs = {"residual_in": residual, "rms_gamma": CALL.gamma}
        output, norm_out = torch.empty_like(x), torch.empty_like(x)
        assert far.allreduce_fusion(x, workspace, 0, output=output) is output
        assert far.allreduce_fusion(x, workspace, 1, norm_out=norm_out, **inputs) is norm_out
        made = far.allreduce_fusion(x, workspace, 1, **inputs)
        assert torch.equal(x, CALL.inputs[workspace.rank])
        assert torch.equal(residual, CALL.residual)
        return made, norm_out

    norm = CALL.expected()[0]
    assert_bits(on_ranks(body), (norm, norm))


def test_epsilon_and_weight_bias() -> None:
    def body(workspace, x, residual):
        return (
            far.allreduce_fusion(
                x, workspace, 1, residual_in=residual, rms_gamma=CALL.gamma, rms_eps=0.5,
                weight_bias=1.0,
            ),
        )  # fmt: skip

    gemma = Call(CALL.inputs, CALL.residual, CALL.gamma, epsilon=0.5, weight_bias=1.0)
    assert_bits(on_ranks(body), gemma.expected()[:1])


def test_strategy_and_pdl_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    passed_on = []

    def plain(input, workspace, launch_with_pdl, output, strategy):
        passed_on.append((strategy.name, launch_with_pdl))

    def fused(*tensors, strategy, launch_with_pdl, **others):
        passed_on.append((strategy.name, launch_with_pdl))
        return None, None

    monkeypatch.setattr(fusion, "trtllm_mnnvl_allreduce", plain)
    monkeypatch.setattr(fusion, "trtllm_mnnvl_fused_allreduce_add_rmsnorm", fused)
    x = CALL.residual
    for pattern, tensors in ((0, {}), (1, {"residual_in": x, "rms_gamma": x})):
        far.allreduce_fusion(x, None, pattern, **tensors)
        far.allreduce_fusion(x, None, pattern, True, use_oneshot=True, **tensors)
        far.allreduce_fusion(x, None, pattern, True, use_oneshot=False, **tensors)
    assert passed_on == [("AUTO", False), ("ONESHOT", True), ("TWOSHOT", True)] * 2


# ---- As engines call it -----------------------------------------------------------------------


def test_as_vllm_calls_it() -> None:
    def body(workspace, x, residual):
        standalone = far.allreduce_fusion(
            input=x,
            workspace=workspace,
            pattern=Pattern.kAllReduce,
            launch_with_pdl=True,
            trigger_completion_at_end=TOKENS > 16,
        )
        far.allreduce_fusion(
            input=x,
            workspace=workspace,
            pattern=Pattern.kARResidualRMSNorm,
            launch_with_pdl=True,
            output=None,
            residual_out=residual,
            norm_out=x,
            quant_out=None,
            scale_out=None,
            residual_in=residual,
            rms_gamma=CALL.gamma,
            rms_eps=1e-6,
            scale_factor=None,
            layout_code=far.QuantizationSFLayout.SWIZZLED_128x4,
            use_oneshot=None,
            fp32_acc=True,
            weight_bias=0.0,
            trigger_completion_at_end=False,
        )
        return standalone, x, residual

    results = on_ranks(body, backend="auto", group=object())  # its adapter comes along, and counts
    assert_bits(results, (*Call(CALL.inputs).expected(), *CALL.expected()))


class OwnAdapter:
    """An engine's own adapter: FlashInfer's six methods, and no base class of ours."""

    def __init__(self, comm: far.InProcessBackend) -> None:
        self.Get_rank, self.Get_size = comm.Get_rank, comm.Get_size
        self.allgather, self.bcast = comm.allgather, comm.bcast
        self.barrier, self.Split = comm.barrier, comm.Split


def test_as_sglang_calls_it() -> None:
    def rank_main(comm: far.InProcessBackend) -> tuple[torch.Tensor, ...]:
        rank = comm.Get_rank()
        workspace = far.create_allreduce_fusion_workspace(
            backend="mnnvl",
            world_size=WORLD_SIZE,
            rank=rank,
            max_token_num=TOKENS,
            hidden_dim=HIDDEN,
            dtype=torch.bfloat16,
            gpus_per_node=1,
            comm_backend=OwnAdapter(comm),
            force_oneshot_support=True,
            device="cpu",
        )
        x = CALL.inputs[rank].clone()
        norm_out, residual_out = torch.empty_like(x), torch.empty_like(x)
        assert workspace.is_buffer_size_sufficient(
            tp_size=WORLD_SIZE,
            num_tokens=TOKENS,
            hidden_dim=HIDDEN,
            dtype=x.dtype,
            use_oneshot=True,
        )
        far.allreduce_fusion(
            input=x,
            workspace=workspace,
            pattern=Pattern.kARResidualRMSNorm,
            launch_with_pdl=True,
            residual_out=residual_out,
            norm_out=norm_out,
            residual_in=CALL.residual,
            rms_gamma=CALL.gamma,
            rms_eps=1e-6,
            use_oneshot=None,
            trigger_completion_at_end=False,
            fp32_acc=False,
        )
        workspace.destroy()
        return norm_out, residual_out

    assert_bits(far.run_ranks(WORLD_SIZE, rank_main), CALL.expected())


def test_names_order_and_defaults() -> None:
    """Engines pass them by name and by place; peers.md 2.1."""
    assert _signature(far.create_allreduce_fusion_workspace) == (
        "backend='auto' world_size=None rank=None max_token_num=None hidden_dim=None dtype=None "
        "gpus_per_node=None comm_backend=None force_oneshot_support=False group=None *device=None"
    )
    assert _signature(far.allreduce_fusion) == (
        "input workspace pattern launch_with_pdl=False trigger_completion_at_end=True output=None "
        "residual_out=None norm_out=None quant_out=None scale_out=None residual_in=None "
        "rms_gamma=None rms_eps=1e-06 scale_factor=None layout_code=None use_oneshot=None "
        "fp32_acc=False moe_reduction_device_num_experts=None moe_reduction_scale_input=None "
        "moe_reduction_active_experts_token_input=None moe_reduction_token_input=None "
        "expanded_idx_to_permuted_idx=None expert_scale_factor=None shared_expert_output=None "
        "block_quant_group_size=None weight_bias=0.0"
    )


def _signature(function: Callable[..., Any]) -> str:
    shown = []
    for name, parameter in inspect.signature(function).parameters.items():
        star = "*" if parameter.kind is parameter.KEYWORD_ONLY else ""
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        shown.append(star + name + default)
    return " ".join(shown)


# ---- The workspace ----------------------------------------------------------------------------


def test_group_is_how_the_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "TorchDistBackend", lambda group: group["ranks"])

    def rank_main(comm: far.InProcessBackend) -> int:
        given = {**SHAPE, "rank": comm.Get_rank(), "group": {"ranks": comm}, "device": "cpu"}
        with far.create_allreduce_fusion_workspace(**given) as workspace:
            return workspace.rank

    assert far.run_ranks(WORLD_SIZE, rank_main) == [0, 1]


@pytest.mark.parametrize(
    ("visible", "given", "seen"), [(0, None, 2), (1, None, 1), (4, None, 2), (4, 8, 8)]
)
def test_gpus_per_node(
    visible: int, given: int | None, seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(fusion, "MNNVLAllReduceFusionWorkspace", lambda mapping, *_, **__: mapping)
    mapping = far.create_allreduce_fusion_workspace(**SHAPE, gpus_per_node=given)
    assert mapping == far.Mapping(WORLD_SIZE, 0, seen, tp_size=WORLD_SIZE)


@pytest.mark.parametrize("force", [False, True])
def test_force_oneshot_support(force: bool) -> None:
    """Of a message that AUTO sends two-shot, one-shot needs more room."""

    def rank_main(comm: far.InProcessBackend) -> bool:
        shape = (1024, HIDDEN, torch.bfloat16)
        with far.create_allreduce_fusion_workspace(
            "mnnvl", 3, comm.Get_rank(), *shape, comm_backend=comm, force_oneshot_support=force,
            device="cpu",
        ) as workspace:  # fmt: skip
            assert workspace.is_buffer_size_sufficient(3, *shape)
            return workspace.is_buffer_size_sufficient(3, *shape, use_oneshot=True)

    assert far.run_ranks(3, rank_main) == [force] * 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"backend": "trtllm"}, r"backend='trtllm': allowed is 'auto' or 'mnnvl'"),
        ({"world_size": None}, "world_size: None; it must be given"),
        ({"rank": None}, "rank: None; it must be given"),
        ({"max_token_num": None}, "max_token_num: None; it must be given"),
        ({"hidden_dim": None}, "hidden_dim: None; it must be given"),
        ({"dtype": None}, "dtype: None; it must be given"),
        ({"world_size": 73}, "world_size=73: allowed is 1 to 72"),
        ({"rank": 2}, "rank=2: allowed is 0 to 1"),
        ({"max_token_num": 0}, "max_token_num=0: allowed is a whole number from 1"),
        ({"max_token_num": 2.5}, "max_token_num=2.5: allowed is a whole number from 1"),
        ({"hidden_dim": 60}, "hidden_dim=60: allowed is a multiple of 16 bytes"),
        ({"dtype": torch.float64}, "dtype=torch.float64: allowed is float32, float16 or bfloat16"),
        ({"gpus_per_node": 0}, "gpus_per_node=0: allowed is a whole number from 1"),
        ({"device": "meta"}, "device=meta: allowed is a CPU or CUDA device"),
    ],
)
def test_wrong_arguments_of_the_workspace(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        far.create_allreduce_fusion_workspace(**{**SHAPE, "device": "cpu", **wrong})


# ---- Wrong calls ------------------------------------------------------------------------------

ALLOWED = r": allowed is kAllReduce \(0\) or kARResidualRMSNorm \(1\)$"


@pytest.mark.parametrize("pattern", [2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
def test_patterns_to_come_and_those_of_trtllm(pattern: int) -> None:
    yet = "" if pattern in (6, 7, 8, 9) else " yet"
    named = rf"^pattern={Pattern(pattern).name} \({pattern}\) is not supported{yet}"
    for given in (pattern, Pattern(pattern)):
        with pytest.raises(ValueError, match=named + ALLOWED):
            far.allreduce_fusion(CALL.residual, None, given)


@pytest.mark.parametrize("pattern", [12, -1, "kAllReduce", None])
def test_unknown_patterns(pattern: object) -> None:
    with pytest.raises(ValueError, match=f"^pattern={pattern!r}{ALLOWED}"):
        far.allreduce_fusion(CALL.residual, None, pattern)


def fused(**changes: Any) -> dict[str, Any]:
    return {"pattern": 1, "residual_in": CALL.residual, "rms_gamma": CALL.gamma, **changes}


ROWS = torch.zeros(TOKENS, HIDDEN + 8, dtype=torch.bfloat16)
SAME = torch.empty_like(CALL.residual)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (fused(residual_in=None), "residual_in: None; it must be given"),
        (fused(rms_gamma=None), "rms_gamma: None; it must be given"),
        # Tensors that the pattern would leave unread or unwritten.
        (
            fused(output=SAME),
            r"output: given; allowed with pattern kARResidualRMSNorm \(1\) is None",
        ),
        (fused(quant_out=SAME), "quant_out: given; allowed"),
        (fused(scale_out=SAME), "scale_out: given; allowed"),
        (fused(pattern=0), r"residual_in: given; allowed with pattern kAllReduce \(0\) is None"),
        (fused(pattern=0, residual_in=None), "rms_gamma: given; allowed"),
        ({"pattern": 0, "norm_out": SAME}, "norm_out: given; allowed"),
        ({"pattern": 0, "residual_out": SAME}, "residual_out: given; allowed"),
        ({"pattern": 0, "quant_out": SAME}, "quant_out: given; allowed"),
        ({"pattern": 0, "scale_out": SAME}, "scale_out: given; allowed"),
        # Refused further down, under the names of these functions.
        (
            {"pattern": 0, "output": ROWS},
            r"output: shape \[3, 72\]; allowed is the input's, \[3, 64\]",
        ),
        (fused(norm_out=ROWS), r"norm_out: shape \[3, 72\]; allowed is the input's, \[3, 64\]"),
        (fused(residual_out=ROWS), r"residual_out: shape \[3, 72\]"),
        (fused(residual_in=ROWS), r"residual_in: shape \[3, 72\]"),
        (fused(rms_gamma=CALL.gamma[:8]), r"rms_gamma: shape \[8\]; allowed is \[64\]"),
        (fused(rms_eps=float("nan")), "rms_eps: nan; allowed is a number that is finite"),
        (
            fused(norm_out=SAME, residual_out=SAME),
            "residual_out: overlaps norm_out; allowed",
        ),
    ],
)
def test_wrong_arguments_of_a_call(arguments: dict[str, Any], message: str) -> None:
    """Refused before any launch: the next right call is right."""

    def body(workspace, x, residual):
        with pytest.raises(ValueError, match=f"^{message}"):
            far.allreduce_fusion(x, workspace, **arguments)
        return (far.allreduce_fusion(x, workspace, 0),)

    assert_bits(on_ranks(body), Call(CALL.inputs).expected())


def test_wrong_types() -> None:
    def body(workspace, x, residual):
        for arguments, message in (
            (fused(rms_gamma=1.0), "rms_gamma: float; allowed is a torch.Tensor"),
            (fused(rms_eps="1e-6"), "rms_eps: '1e-6'; allowed is a number"),
            (fused(norm_out=[]), "norm_out: list; allowed is a torch.Tensor"),
        ):
            with pytest.raises(TypeError, match=f"^{message}"):
                far.allreduce_fusion(x, workspace, **arguments)
        with pytest.raises(TypeError, match=r"^workspace: NoneType; allowed"):
            far.allreduce_fusion(x, None, 0)

    on_ranks(body)
