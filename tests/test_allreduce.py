"""Both kernels on both substrates, bit for bit against the reference (in-process ranks)."""

from __future__ import annotations

import pytest
import torch
from harness import DTYPES, Call, Strategy, check, random_call, stream_of_rank

import flashinfer_ar as far
from flashinfer_ar import reference

STRATEGIES = (Strategy.ONESHOT, Strategy.TWOSHOT)
WORLD_SIZES = (2, 3, 4, 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_random_inputs(world_size: int, dtype: torch.dtype, device: torch.device) -> None:
    calls = [
        random_call(
            world_size, num_tokens, 256, dtype, fused=fused, seed=seed, strategy=strategy,
            launch_with_pdl=bool(seed % 2),
        )
        for seed, num_tokens in enumerate((1, 5, 2, 33))
        for strategy in STRATEGIES
        for fused in (False, True)
    ]  # fmt: skip
    check(world_size, calls, device, hidden_dim=256, dtype=dtype)


@pytest.mark.parametrize("world_size", [1, 5, 6, 7, 12])
def test_any_world_size(world_size: int, device: torch.device) -> None:
    calls = [
        random_call(world_size, num_tokens, 64, torch.bfloat16, fused=True, strategy=strategy)
        for strategy in STRATEGIES
        for num_tokens in sorted({1, 2, max(world_size - 1, 1), world_size, world_size + 1})
    ]
    check(world_size, calls, device)


@pytest.mark.parametrize("hidden", [8, 64, 120, 1000, 2880, 4096, 7176, 16384])
def test_hidden_sizes(hidden: int, device: torch.device) -> None:
    calls = [
        random_call(2, num_tokens, hidden, torch.bfloat16, fused=True, strategy=strategy)
        for strategy in STRATEGIES
        for num_tokens in (1, 3)
    ]
    check(2, calls, device, hidden_dim=hidden, dtype=torch.bfloat16)


def test_shapes_dtypes_and_strategies_share_a_workspace(device: torch.device) -> None:
    """Nothing of a call may be left in the slots of the next one, whatever its layout was."""
    shapes = [(2, 7168), (1, 64), (1, 64), (2, 7168), (2, 64), (1, 7168), (2, 64), (2, 64), (5, 64)]
    kinds = [Strategy.TWOSHOT, Strategy.ONESHOT, Strategy.AUTO, Strategy.TWOSHOT]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.bfloat16]
    calls = [
        random_call(
            3, *shape, dtypes[i % 4], fused=i % 3 == 0, seed=i, strategy=kinds[i % len(kinds)]
        )
        for i, shape in enumerate(shapes * 3)
    ]
    check(3, calls, device)


def test_zero_tokens_launch_nothing(device: torch.device) -> None:
    calls = [
        random_call(2, num_tokens, 64, torch.float16, fused=fused)
        for num_tokens in (1, 0, 3)
        for fused in (False, True)
    ]
    check(2, calls, device)


def test_more_tokens_than_ctas(device: torch.device) -> None:
    calls = [
        random_call(2, 700, 64, torch.bfloat16, fused=fused, strategy=strategy)
        for fused in (False, True)
        for strategy in STRATEGIES
    ]
    check(2, calls, device)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_negative_subnormals_are_not_the_sentinel(strategy: Strategy, device: torch.device) -> None:
    """As flushed floats they would equal -0.0, and a reader that compares floats spins for ever."""
    calls = []
    for dtype, patterns in (
        (torch.bfloat16, [0x8001, 0x807F, 0x8001, 0x0001]),
        (torch.float16, [0x8001, 0x83FF, 0x8200, 0x0001]),
        (torch.float32, [0x80000001, 0x807FFFFF, 0x80400000, 0x00000001]),
    ):
        size = 16 // dtype.itemsize * 4
        rows = [
            _from_bits([patterns[(i + rank) % 4] for i in range(size)], dtype) for rank in (0, 1)
        ]
        calls.append(Call([row.reshape(1, -1) for row in rows], strategy=strategy))
        zero = _from_bits([0, patterns[0]] * (size // 2), dtype).reshape(1, -1)
        calls.append(Call([zero, zero], strategy=strategy))
    check(2, calls, device)


def test_subnormals_survive_a_process_that_flushes_them() -> None:
    def flush(rank: int) -> None:
        assert torch.set_flush_denormal(True)  # of the rank's own thread

    rows = [_from_bits([0x8001, 0x0001, 0x8001, 0x807F] * 16, torch.bfloat16).reshape(1, 64)] * 2
    calls = [Call(rows, strategy=strategy, before=flush) for strategy in STRATEGIES]
    assert calls[0].expected()[0].count_nonzero() == 64
    check(2, calls, torch.device("cpu"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_negative_zeros(strategy: Strategy, device: torch.device) -> None:
    calls = []
    for dtype in DTYPES:
        zeros = torch.zeros(2, 64, dtype=dtype)
        ones = torch.ones(2, 64, dtype=dtype)
        mixed = torch.where(torch.arange(64) % 2 == 0, zeros, -zeros)  # a word of 0x80000000
        for inputs in ([-zeros, -zeros, -zeros], [-zeros, ones, zeros], [mixed, mixed, -mixed]):
            calls.append(Call(inputs, strategy=strategy))
            calls.append(Call(inputs, -zeros, -ones[0], strategy=strategy))
            calls.append(Call(inputs, ones, -zeros[0], strategy=strategy))
    # The smallest normal and a larger negative one: the sum is a negative subnormal.
    row = [
        _from_bits([pattern] * 64, torch.bfloat16).reshape(1, 64) for pattern in (0x0080, 0x80A0, 0)
    ]
    calls.append(Call(row, strategy=strategy))
    check(3, calls, device)
    assert not torch.signbit(reference.allreduce([-zeros, -zeros])).any()


def test_squares_do_not_overflow_fp16(device: torch.device) -> None:
    inputs = [torch.full((1, 256), 150.0, dtype=torch.float16)] * 2
    call = Call(
        inputs, torch.zeros(1, 256, dtype=torch.float16), torch.ones(256, dtype=torch.float16)
    )
    assert call.expected()[0].sub(1).abs().max() < 1e-3
    check(2, [call], device)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_stay_in_their_row(
    dtype: torch.dtype, strategy: Strategy, device: torch.device
) -> None:
    patterns = {
        torch.bfloat16: [0x7FC0, 0xFFC0, 0x7F81, 0xFFFF, 0x7F80, 0xFF80],
        torch.float16: [0x7E00, 0xFE00, 0x7C01, 0xFFFF, 0x7C00, 0xFC00],
        torch.float32: [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000],
    }[dtype]
    calls = []
    for pattern in patterns:
        clean = random_call(2, 3, 64, dtype, fused=True, strategy=strategy)
        dirty = random_call(2, 3, 64, dtype, fused=True, strategy=strategy)
        dirty.inputs[1][1, 7] = _from_bits([pattern], dtype)[0]
        for rows in (0, 2):  # the reference itself leaves the other rows alone
            assert torch.equal(dirty.expected()[0][rows], clean.expected()[0][rows])
        calls += [clean, dirty, Call(dirty.inputs, strategy=strategy)]
    check(2, calls, device)


def test_gemma_weight_bias(device: torch.device) -> None:
    calls = [random_call(2, 3, 256, torch.bfloat16, fused=True, weight_bias=1.0, epsilon=1e-6)]
    check(2, calls, device)


def test_one_token_does_not_depend_on_the_batch(device: torch.device) -> None:
    """The same rows in calls of 1, 4 and 64 tokens, one-shot and two-shot: the same bits."""
    full = random_call(4, 64, 2880, torch.bfloat16, fused=True)
    calls = [
        Call([rows[:n].clone() for rows in full.inputs], full.residual[:n].clone(), full.gamma,
             strategy=strategy)
        for n in (1, 4, 64)
        for strategy in STRATEGIES
    ]  # fmt: skip
    check(4, calls, device)
    for call in calls:
        n = len(call.residual)
        assert torch.equal(call.expected()[0], full.expected()[0][:n])


def test_in_place(device: torch.device) -> None:
    call = random_call(2, 5, 64, torch.float32, fused=True)

    def rank_main(comm: far.InProcessBackend) -> tuple[torch.Tensor, ...]:
        workspace = far.MNNVLAllReduceFusionWorkspace(
            far.Mapping(2, comm.Get_rank(), tp_size=2), 5, 64, torch.float32, comm_backend=comm,
            device=device,
        )  # fmt: skip
        with workspace, stream_of_rank(device):
            x = call.inputs[comm.Get_rank()].to(device, copy=True)
            residual, gamma = call.residual.to(device, copy=True), call.gamma.to(device)
            comm.barrier()
            far.trtllm_mnnvl_fused_allreduce_add_rmsnorm(
                x, residual, gamma, workspace, 1e-5, output=x, residual_out=residual
            )
            workspace.synchronize()
            return x.cpu(), residual.cpu()

    for outputs in far.run_ranks(2, rank_main):
        for have, due in zip(outputs, call.expected(), strict=True):
            assert torch.equal(have, due)


def _from_bits(patterns: list[int], dtype: torch.dtype) -> torch.Tensor:
    size = dtype.itemsize
    data = b"".join(pattern.to_bytes(size, "little") for pattern in patterns)
    return torch.frombuffer(bytearray(data), dtype=dtype)
