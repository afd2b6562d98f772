"""Sizes: a buffer holds exactly the calls that the questions about it promise, and no word more."""

from __future__ import annotations

import pytest
import torch
from harness import Strategy, stream_of_rank
from workspace_tools import SENTINEL, open_workspace, ring_words

import flashinfer_ar as far
from flashinfer_ar import plan
from flashinfer_ar.jit import KernelKind
from flashinfer_ar.jit.spec import WARP_SIZE

bf16 = torch.bfloat16
CANARY = 0x12345678
KINDS = {Strategy.ONESHOT: KernelKind.ONESHOT, Strategy.TWOSHOT: KernelKind.TWOSHOT}
each_kind = pytest.mark.parametrize("strategy", KINDS, ids=lambda strategy: strategy.name)


def takes(workspace, num_tokens, hidden, strategy):
    """Whether a call is run rather than refused; every rank asks alike."""
    try:
        far.trtllm_mnnvl_allreduce(
            torch.zeros(num_tokens, hidden, dtype=bf16), workspace, False, strategy=strategy
        )
    except ValueError as error:
        assert f"[{num_tokens}, {hidden}] bfloat16 needs" in str(error)
        return False
    return True


@each_kind
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [1, 32, 33, 200])
def test_the_required_size_is_the_least_that_takes_the_call(strategy, world_size, num_tokens):
    """A row is one slot here."""
    required = far.MNNVLAllReduceFusionWorkspace.get_required_buffer_size_bytes

    def rank_main(comm):
        size_bytes = required(world_size, num_tokens, 8, bf16, strategy, device="cpu")
        found = []
        for smaller in (0, 16):
            with open_workspace(comm, buffer_size_in_bytes=size_bytes - smaller or 1) as workspace:
                for tokens in (num_tokens, num_tokens + 1):
                    asked = (world_size, tokens, 8, bf16)
                    told = workspace.is_buffer_size_sufficient(*asked, strategy=strategy)
                    use_oneshot = strategy is Strategy.ONESHOT
                    assert told == workspace.is_buffer_size_sufficient(*asked, use_oneshot)
                    assert told == takes(workspace, tokens, 8, strategy)
                    found.append(told)
                assert not workspace.is_buffer_size_sufficient(world_size + 1, 1, 8, bf16)
        return found

    expected = [True, False, False, False]
    if required(world_size, num_tokens, 8, bf16, strategy, device="cpu") == 16:
        expected[2] = True  # there is no smaller buffer than one slot
    assert far.run_ranks(world_size, rank_main) == [expected] * world_size


@each_kind
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_packs", [1, 33, 96, 300])
def test_a_call_uses_its_slots_to_the_last_and_none_beyond(strategy, world_size, num_packs, device):
    used = plan.generation_bytes(KINDS[strategy], world_size, num_packs * 16)

    def rank_main(comm):
        rank = comm.Get_rank()
        with stream_of_rank(device), open_workspace(comm, device) as workspace:
            tensors = [torch.zeros(num_packs, 8, dtype=bf16, device=device) for _ in range(2)]
            fill, ring = workspace._substrate.fill, workspace.uc_ptr_local
            generation = workspace.buffer_size_bytes
            for half in (ring, ring + generation):
                fill(half + used, generation - used, CANARY)
            fill(ring + used - 16, 16, CANARY)
            comm.barrier()
            far.trtllm_mnnvl_allreduce(tensors[0], workspace, False, tensors[1], strategy)
            workspace.synchronize()
            comm.barrier()
            words = ring_words(workspace)
            comm.barrier()
        assert (words[:, used // 4 :] == CANARY).all()
        assert (words[1, : used // 4] == SENTINEL).all()
        assert (words[0, : used // 4 - 4] == SENTINEL).all()
        # The last slot is the last rank's contribution, or the result of the last stripe's owner;
        # neither sends it to itself.
        owner = (num_packs - 1) // WARP_SIZE % world_size
        sender = owner if strategy is Strategy.TWOSHOT else world_size - 1
        touched = rank != sender
        assert bool((words[0, used // 4 - 4 : used // 4] == CANARY).any()) != touched

    far.run_ranks(world_size, rank_main)


@pytest.mark.parametrize(("most_tokens", "one_shot_fits"), [(4, True), (12, False)])
def test_a_workspace_made_for_a_shape_takes_all_smaller_ones(most_tokens, one_shot_fits):
    """With AUTO 4 of these tokens go one-shot, more of them two-shot."""

    def rank_main(comm):
        sizes = {"max_num_tokens": most_tokens, "hidden_dim": 8192, "dtype": bf16}
        found = []
        for force in (False, True):
            arguments = {"buffer_size_in_bytes": None, "force_oneshot_support": force}
            with open_workspace(comm, **sizes, **arguments) as workspace:
                for strategy in (Strategy.AUTO, Strategy.TWOSHOT):
                    for num_tokens in range(1, most_tokens + 1):
                        assert takes(workspace, num_tokens, 8192, strategy)
                found.append(takes(workspace, most_tokens, 8192, Strategy.ONESHOT))
        return found

    assert far.run_ranks(3, rank_main) == [[one_shot_fits, True]] * 3
