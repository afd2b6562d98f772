"""What a workspace does besides calls: comparing them between ranks, and giving its memory back."""

from __future__ import annotations

import pytest
import torch
from harness import Strategy, random_call, stream_of_rank
from workspace_tools import is_armed, open_workspace, outcomes

import flashinfer_ar as far
from flashinfer_ar import env

HIDDEN = 64
bf16 = torch.bfloat16


# Debug mode: ranks that disagree learn it at once


DIFFERENT_CALLS = {
    "tokens": ((2, bf16, Strategy.AUTO), (3, bf16, Strategy.AUTO), "num_tokens=3"),
    "no tokens": ((2, bf16, Strategy.AUTO), (0, bf16, Strategy.AUTO), "num_tokens=0"),
    "dtype": ((2, bf16, Strategy.AUTO), (2, torch.float16, Strategy.AUTO), "FLOAT16"),
    "strategy": ((2, bf16, Strategy.ONESHOT), (2, bf16, Strategy.TWOSHOT), "TWOSHOT"),
}


@pytest.mark.parametrize(("one", "other", "named"), DIFFERENT_CALLS.values(), ids=DIFFERENT_CALLS)
def test_debug_mode_names_the_difference(one, other, named, device, monkeypatch):
    monkeypatch.setenv("FLASHINFER_AR_DEBUG", "1")

    def rank_main(comm):
        num_tokens, dtype, strategy = other if comm.Get_rank() == 1 else one
        with stream_of_rank(device), open_workspace(comm, device) as workspace:
            row = torch.ones(num_tokens, HIDDEN, dtype=dtype, device=device)
            equal = torch.ones(1, HIDDEN, dtype=dtype, device=device).to(bf16)
            far.trtllm_mnnvl_allreduce(equal, workspace, False)  # what is alike runs
            comm.barrier()
            with pytest.raises(far.CallMismatchError) as caught:
                far.trtllm_mnnvl_allreduce(row, workspace, False, strategy=strategy)
            comm.barrier()
            return str(caught.value)

    messages = far.run_ranks(3, rank_main, timeout_s=20.0)
    assert len(set(messages)) == 1
    assert messages[0].startswith("ranks disagree on the call: ")
    assert named in messages[0]
    assert "on ranks 1" in messages[0]


def test_a_switch_set_on_one_rank_is_named_at_creation(monkeypatch):
    ranks = iter([True, False, False])
    monkeypatch.setattr(env, "debug", lambda: next(ranks))
    errors = outcomes(3, open_workspace)
    assert {type(error) for error in errors} == {far.SymmetricMemoryError}
    assert len({str(error) for error in errors}) == 1
    assert "ranks disagree on FLASHINFER_AR_DEBUG" in str(errors[0])


# Checkpoint: memory goes and comes back at the same addresses


def test_memory_given_back_and_restored(device):
    calls = [random_call(3, 5, HIDDEN, bf16, seed=i) for i in range(4)]
    expected = [call.expected()[0] for call in calls]

    def rank_main(comm):
        rank = comm.Get_rank()
        with stream_of_rank(device), open_workspace(comm, device) as workspace:
            inputs = [call.inputs[rank].to(device) for call in calls]
            output = torch.empty_like(inputs[0])
            comm.barrier()
            addresses = workspace.uc_ptrs
            got = []
            for row in inputs:
                far.trtllm_mnnvl_allreduce(row, workspace, False, output)
                workspace.checkpoint_prepare()
                workspace.checkpoint_prepare()  # safe twice
                got.append(output.cpu().clone())
                with pytest.raises(far.CheckpointError, match="checkpoint_restore"):
                    far.trtllm_mnnvl_allreduce(row, workspace, False, output)
                workspace.checkpoint_restore()
                workspace.checkpoint_restore()
                assert workspace.uc_ptrs == addresses
                assert is_armed(workspace)
                comm.barrier()
            return got

    for got in far.run_ranks(3, rank_main):
        for have, due in zip(got, expected, strict=True):
            assert torch.equal(have, due)


def test_memory_is_really_given_back():
    """Host memory that is not there reads as zeros, not as the sentinel."""

    def rank_main(comm):
        with open_workspace(comm, torch.device("cpu")) as workspace:
            workspace.checkpoint_prepare()
            gone = not is_armed(workspace)
            comm.barrier()
            workspace.checkpoint_restore()
            return gone and is_armed(workspace)

    assert far.run_ranks(2, rank_main) == [True, True]


def test_restore_with_another_order_of_ranks_is_refused():
    def rank_main(comm):
        with open_workspace(comm, torch.device("cpu")) as workspace:
            workspace.checkpoint_prepare()
            reversed_comm = comm.Split(0, -comm.Get_rank())
            with pytest.raises(ValueError, match="comm_backend: rank"):
                workspace.checkpoint_restore(reversed_comm)
            workspace.checkpoint_restore(comm.Split(0, comm.Get_rank()))
            comm.barrier()
            return is_armed(workspace)

    assert far.run_ranks(2, rank_main) == [True, True]
