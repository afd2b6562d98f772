"""A wrong argument: the error names it, nothing is written or launched, right calls still work."""

from __future__ import annotations

import inspect

import pytest
import torch
from harness import Strategy, random_call
from workspace_tools import epoch_word

import flashinfer_ar as far
from flashinfer_ar import reference

TOKENS, HIDDEN = 3, 64
UNTOUCHED = 7.0

bf16 = torch.bfloat16
meta = torch.device("meta")


def make_workspace(max_num_tokens=TOKENS, hidden_dim=HIDDEN, dtype=bf16, **more):
    return far.MNNVLAllReduceFusionWorkspace(
        far.Mapping(), max_num_tokens, hidden_dim, dtype, device="cpu", **more
    )


@pytest.fixture(scope="module")
def workspace():
    with make_workspace() as workspace:
        yield workspace


def zeros(*shape, dtype=bf16, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


def misaligned(*shape):
    """One element behind a 16-byte boundary."""
    return zeros(torch.Size(shape).numel() + 8)[1 : torch.Size(shape).numel() + 1].view(shape)


def right_arguments(workspace, **changes):
    call = random_call(1, TOKENS, HIDDEN, bf16, fused=True)
    arguments = {
        "input": call.inputs[0],
        "residual_in": call.residual,
        "gamma": call.gamma,
        "workspace": workspace,
        "epsilon": 1e-5,
        "output": torch.full((TOKENS, HIDDEN), UNTOUCHED, dtype=bf16),
        "residual_out": torch.full((TOKENS, HIDDEN), UNTOUCHED, dtype=bf16),
        "launch_with_pdl": False,
        "strategy": Strategy.AUTO,
        "weight_bias": 0.0,
    }
    return arguments | changes


def run(function, arguments):
    known = inspect.signature(function).parameters
    return function(**{name: value for name, value in arguments.items() if name in known})


def check_refused(function, workspace, exception, message, **changes):
    """The whole contract, for one wrong argument."""
    arguments = right_arguments(workspace, **changes)
    before = epoch_word(workspace)
    with pytest.raises(exception, match=message):
        run(function, arguments)
    for name in ("output", "residual_out"):
        if name not in changes:
            assert (arguments[name] == UNTOUCHED).all()
    assert epoch_word(workspace) == before
    check_right(function, workspace)
    assert epoch_word(workspace) == before + (1 << 16)


def check_right(function, workspace):
    call = random_call(1, TOKENS, HIDDEN, bf16, fused=True)
    arguments = right_arguments(workspace)
    run(function, arguments)
    if function is fused:
        assert torch.equal(arguments["output"], call.expected()[0])
        assert torch.equal(arguments["residual_out"], call.expected()[1])
    else:
        assert torch.equal(arguments["output"], reference.allreduce(call.inputs))


plain = far.trtllm_mnnvl_allreduce
fused = far.trtllm_mnnvl_fused_allreduce_add_rmsnorm
both = pytest.mark.parametrize("function", [plain, fused], ids=["plain", "fused"])

INPUTS = {
    "nothing": (None, TypeError, "NoneType; allowed is a torch.Tensor"),
    "a list": ([[1.0] * HIDDEN], TypeError, "list"),
    "1-D": (zeros(HIDDEN), ValueError, r"shape \[64\]; allowed is \[num_tokens, hidden\]"),
    "3-D": (zeros(1, TOKENS, HIDDEN), ValueError, r"shape \[1, 3, 64\]"),
    "float64": (zeros(3, 64, dtype=torch.float64), ValueError, "torch.float64; allowed is"),
    "int32": (zeros(3, 64, dtype=torch.int32), ValueError, "torch.int32; allowed is"),
    "complex": (zeros(3, 64, dtype=torch.complex64), ValueError, "torch.complex64"),
    "60 elements": (zeros(3, 60), ValueError, "hidden size 60 .* multiple of 16 bytes"),
    "2 floats": (zeros(3, 2, dtype=torch.float32), ValueError, "hidden size 2 .* 8 bytes"),
    "0 elements": (zeros(3, 0), ValueError, "hidden size 0 .* 0 bytes"),
    "transposed": (zeros(64, 3).t(), ValueError, r"strides \(1, 3\); allowed is a contig"),
    "every other row": (zeros(6, 64)[::2], ValueError, r"strides \(128, 1\)"),
    "expanded": (zeros(1, 64).expand(3, 64), ValueError, r"strides \(0, 1\)"),
    "misaligned": (misaligned(3, 64), ValueError, "address 0x.*; allowed is a multiple of"),
    "meta": (zeros(3, 64, device=meta), ValueError, "on meta; allowed is .* device, cpu"),
}


@both
@pytest.mark.parametrize(("value", "exception", "message"), INPUTS.values(), ids=INPUTS)
def test_wrong_input(function, value, exception, message, workspace):
    check_refused(function, workspace, exception, f"^input: {message}", input=value)


@both
def test_input_larger_than_the_workspace(function, workspace):
    large = {name: zeros(99, HIDDEN) for name in ("input", "residual_in", "output", "residual_out")}
    large["output"] += UNTOUCHED
    message = r"^input: \[99, 64\] bfloat16 needs 12672 bytes .*; allowed is .*=\d+"
    check_refused(function, workspace, ValueError, message, **large)
    assert (large["output"] == UNTOUCHED).all()


# What holds for every tensor that must look like the input.
LIKE_INPUT = {
    "a number": (1.0, TypeError, "float; allowed is a torch.Tensor"),
    "1-D": (zeros(HIDDEN), ValueError, r"shape \[64\]; allowed is the input's, \[3, 64\]"),
    "a token short": (zeros(2, 64), ValueError, r"shape \[2, 64\]"),
    "another hidden": (zeros(3, 72), ValueError, r"shape \[3, 72\]"),
    "3-D": (zeros(3, 64, 1), ValueError, r"shape \[3, 64, 1\]"),
    "float16": (zeros(3, 64, dtype=torch.float16), ValueError, "torch.float16; allowed is the inp"),
    "transposed": (zeros(64, 3).t(), ValueError, r"strides \(1, 3\)"),
    "misaligned": (misaligned(3, 64), ValueError, "address 0x"),
    "meta": (zeros(3, 64, device=meta), ValueError, "on meta; allowed is the workspace's device"),
}


@pytest.mark.parametrize("name", ["residual_in", "output", "residual_out"])
@pytest.mark.parametrize(("value", "exception", "message"), LIKE_INPUT.values(), ids=LIKE_INPUT)
def test_wrong_tensor_beside_the_input(name, value, exception, message, workspace):
    check_refused(fused, workspace, exception, f"^{name}: {message}", **{name: value})


@pytest.mark.parametrize(("value", "exception", "message"), LIKE_INPUT.values(), ids=LIKE_INPUT)
def test_wrong_output_of_the_plain_call(value, exception, message, workspace):
    check_refused(plain, workspace, exception, f"^output: {message}", output=value)


def test_the_residual_has_no_default(workspace):
    message = "residual_in: NoneType; allowed is a torch.Tensor"
    check_refused(fused, workspace, TypeError, message, residual_in=None)


def test_two_outputs_in_one_place(workspace):
    output = zeros(TOKENS, HIDDEN)
    changes = {"output": output, "residual_out": output}
    check_refused(fused, workspace, ValueError, "residual_out: overlaps output", **changes)


def test_tensors_that_overlap_in_part(workspace):
    """Rows are written while others are still to be read: in place is right, shifted is not."""
    rows = zeros(TOKENS + 1, HIDDEN)
    shifted = {"output": rows[:-1], "residual_out": rows[1:]}
    check_refused(fused, workspace, ValueError, "residual_out: overlaps output", **shifted)
    for name in ("output", "residual_out"):
        shifted = {"input": rows[:-1], name: rows[1:]}
        check_refused(fused, workspace, ValueError, f"{name}: overlaps input in part", **shifted)
    check_refused(
        plain, workspace, ValueError, "output: overlaps input in part", input=rows[:-1],
        output=rows[1:],
    )  # fmt: skip


GAMMAS = {
    "nothing": (None, TypeError, "NoneType; allowed is a torch.Tensor"),
    "2-D": (zeros(1, HIDDEN), ValueError, r"shape \[1, 64\]; allowed is \[64\]"),
    "too short": (zeros(56), ValueError, r"shape \[56\]; allowed is \[64\]"),
    "float32": (zeros(HIDDEN, dtype=torch.float32), ValueError, "torch.float32; allowed is"),
    "every other": (zeros(2 * HIDDEN)[::2], ValueError, r"strides \(2,\)"),
    "misaligned": (misaligned(HIDDEN), ValueError, "address 0x"),
    "meta": (zeros(HIDDEN, device=meta), ValueError, "on meta"),
}


@pytest.mark.parametrize(("value", "exception", "message"), GAMMAS.values(), ids=GAMMAS)
def test_wrong_gamma(value, exception, message, workspace):
    check_refused(fused, workspace, exception, f"^gamma: {message}", gamma=value)


@pytest.mark.parametrize("name", ["epsilon", "weight_bias"])
@pytest.mark.parametrize(
    ("value", "exception"),
    [
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (float("-inf"), ValueError),
        ("1e-5", TypeError),
        (True, TypeError),
        (1j, TypeError),
        (torch.ones(2), TypeError),
        (1e39, ValueError),
        pytest.param(10**400, ValueError, id="10**400"),
    ],
)
def test_wrong_number(name, value, exception, workspace):
    check_refused(fused, workspace, exception, f"^{name}: ", **{name: value})


@both
@pytest.mark.parametrize("value", [0, 1, "ONESHOT", None, True, Strategy])
def test_wrong_strategy(function, value, workspace):
    message = "^strategy: .*; allowed is a MNNVLAllreduceFusionStrategy"
    check_refused(function, workspace, TypeError, message, strategy=value)


@both
@pytest.mark.parametrize("value", ["yes", None, 2, torch.zeros(2)], ids=repr)
def test_wrong_pdl_switch(function, value, workspace):
    check_refused(function, workspace, TypeError, "^launch_with_pdl: ", launch_with_pdl=value)


@both
@pytest.mark.parametrize("value", [None, "workspace", far.AllReduceFusionWorkspace(1, 0)])
def test_wrong_workspace(function, value, workspace):
    message = "^workspace: .*; allowed is a MNNVLAllReduceFusionWorkspace"
    arguments = right_arguments(value)
    with pytest.raises(TypeError, match=message):
        run(function, arguments)
    assert (arguments["output"] == UNTOUCHED).all()
    check_right(function, workspace)


@both
def test_closed_workspace(function, workspace):
    closed = make_workspace()
    closed.close()
    arguments = right_arguments(closed)
    with pytest.raises(ValueError, match=r"^workspace: it is closed; allowed is an open one"):
        run(function, arguments)
    assert (arguments["output"] == UNTOUCHED).all()
    check_right(function, workspace)


def test_unknown_keyword(workspace):
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        plain(zeros(TOKENS, HIDDEN), workspace, False, scale=1.0)


def test_rms_norm_has_a_largest_hidden_size():
    with make_workspace(1, 65544) as workspace:
        row = zeros(1, 65544)
        with pytest.raises(ValueError, match=r"input: \[1, 65544\] .* hidden size up to 65536"):
            fused(row, row.clone(), row[0].clone(), workspace)
        assert epoch_word(workspace) == 0
        assert torch.equal(plain(row + 1, workspace, False), row + 1)


def test_a_rank_that_is_refused_can_still_make_the_call():
    """The other waits in the kernel meanwhile; nothing of a refused call may have reached it."""
    call = random_call(2, TOKENS, HIDDEN, bf16, strategy=Strategy.TWOSHOT)

    def rank_main(comm):
        rank = comm.Get_rank()
        mapping = far.Mapping(2, rank, tp_size=2)
        arguments = {"comm_backend": comm, "device": "cpu", "buffer_size_in_bytes": 4096}
        with far.MNNVLAllReduceFusionWorkspace(mapping, **arguments) as workspace:
            comm.barrier()
            if rank == 1:
                for wrong in (zeros(TOKENS, 60), zeros(64, TOKENS, HIDDEN), zeros(64, HIDDEN)):
                    with pytest.raises(ValueError, match="input"):
                        plain(wrong, workspace, False, strategy=call.strategy)
            return plain(call.inputs[rank], workspace, False, strategy=call.strategy)

    for output in far.run_ranks(2, rank_main):
        assert torch.equal(output, call.expected()[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@both
def test_tensor_on_a_gpu_for_a_workspace_on_the_cpu(function, workspace):
    message = "input: on cuda:0; allowed is the workspace's device, cpu"
    there = zeros(TOKENS, HIDDEN, device="cuda")
    check_refused(function, workspace, ValueError, message, input=there)
