"""The workspace: armed before anyone publishes, made, failed and closed by all ranks alike."""

from __future__ import annotations

import time

import pytest
import torch
from harness import Strategy, assert_outputs_equal, check, random_call, stream_of_rank
from workspace_tools import CPU, epoch_word, is_armed, open_workspace, outcomes, this_rank

import flashinfer_ar as far
from flashinfer_ar import env
from flashinfer_ar import workspace as workspace_module
from flashinfer_ar.calls import Calls
from flashinfer_ar.launch.host import HostSubstrate

bf16 = torch.bfloat16


# Creation


@pytest.mark.parametrize("size_bytes", [1, 16, 1000, 4104])
def test_after_creation_every_word_is_the_sentinel(size_bytes, device):
    def rank_main(comm):
        with open_workspace(comm, device, buffer_size_in_bytes=size_bytes) as workspace:
            rounded = -(-size_bytes // 16) * 16
            assert workspace.buffer_size_bytes == rounded
            assert workspace.workspace_size_bytes == 2 * rounded
            assert workspace.mc_ptr is None
            assert workspace.uc_ptr_local == workspace.uc_ptrs[comm.Get_rank()]
            return is_armed(workspace)

    assert far.run_ranks(3, rank_main) == [True] * 3


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_late_fill_does_not_wipe_out_a_fast_peer_s_first_publish(late, device, monkeypatch):
    substrate = type(workspace_module.substrate_of(device))
    fill = substrate.fill

    def fill_late(self, address, size_bytes, word):
        if this_rank() == late:
            time.sleep(0.2)
        fill(self, address, size_bytes, word)

    monkeypatch.setattr(substrate, "fill", fill_late)
    monkeypatch.setenv("FLASHINFER_AR_TIMEOUT_S", "5")
    call = random_call(3, 2, 64, bf16)

    def rank_main(comm):
        rank = comm.Get_rank()
        with stream_of_rank(device):
            inputs = call.inputs[rank].to(device)
            output = torch.empty_like(inputs)
            with open_workspace(comm, device) as workspace:
                # No barrier here: the creation itself has to be one.
                far.trtllm_mnnvl_allreduce(inputs, workspace, False, output, Strategy.ONESHOT)
                workspace.synchronize()
                return (output.cpu(),)

    for rank, output in enumerate(far.run_ranks(3, rank_main)):
        assert_outputs_equal([output], [call.expected()], f"rank {rank}")


def on_rank(rank, value, others):
    return lambda: value if this_rank() == rank else others


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize(
    ("name", "value", "others", "message"),
    [
        ("buffer_size_in_bytes", 4096, 8192, "the buffer size in bytes: .*4096"),
        ("hidden_dim", 64, 128, r"hidden_dim and dtype: .*\(64, 'torch.bfloat16'\)"),
        ("hidden_dim", None, 128, r"hidden_dim and dtype: .*\(None, "),
        ("dtype", torch.float16, bf16, "hidden_dim and dtype: .*torch.float16"),
        ("max_ctas", 2, None, "FLASHINFER_AR_MAX_CTAS: "),
        ("timeout_s", 1.0, 60.0, "FLASHINFER_AR_TIMEOUT_S: "),
    ],
)
def test_ranks_that_disagree_all_raise_the_same(odd, name, value, others, message, monkeypatch):
    of_rank = on_rank(odd, value, others)

    def rank_main(comm):
        arguments = {"hidden_dim": 64, "dtype": bf16}
        if not hasattr(env, name):
            arguments[name] = of_rank()
        open_workspace(comm, **arguments)

    if hasattr(env, name):
        monkeypatch.setattr(env, name, of_rank)
    errors = outcomes(3, rank_main)
    assert {type(error) for error in errors} == {far.SymmetricMemoryError}
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(far.SymmetricMemoryError, match=f"^ranks disagree on {message}"):
        raise errors[0]


@pytest.mark.parametrize("name", ["max_ctas", "timeout_s"])
def test_a_switch_that_one_rank_cannot_read_is_everyone_s_error(name, monkeypatch):
    real = getattr(env, name)

    def read():
        if this_rank() == 1:
            raise ValueError(f"FLASHINFER_AR_{name.upper()}='x'")
        return real()

    monkeypatch.setattr(env, name, read)
    errors = outcomes(3, open_workspace, timeout_s=1.0)
    assert len({str(error) for error in errors}) == 1


def test_ranks_may_call_their_devices_by_different_numbers(monkeypatch):
    """As with one process a GPU; the machine is the host all the same."""
    monkeypatch.setattr(
        workspace_module, "device_of", lambda device: torch.device("cuda", this_rank())
    )
    monkeypatch.setattr(workspace_module, "substrate_of", lambda device: HostSubstrate())
    assert outcomes(3, lambda comm: open_workspace(comm).close()) == [None] * 3


STEPS = {
    "open": (workspace_module, "substrate_of", "open the device and read the environment"),
    "fill": (HostSubstrate, "fill", "arm the ring and load the kernels"),
    "load": (Calls, "load_ahead", "arm the ring and load the kernels"),
}


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize(("owner", "function", "step"), STEPS.values(), ids=STEPS)
def test_a_failure_is_everyone_s_and_is_rolled_back(owner, function, step, failing, monkeypatch):
    real, allocate, memories = getattr(owner, function), HostSubstrate.allocate, []

    def fail(*arguments):
        if this_rank() == failing:
            raise far.JitError("no compiler today")
        return real(*arguments)

    def remember(self, comm, size_bytes):
        memories.append(allocate(self, comm, size_bytes))
        return memories[-1]

    with monkeypatch.context() as patch:
        patch.setattr(owner, function, fail)
        patch.setattr(HostSubstrate, "allocate", remember)
        errors = outcomes(3, open_workspace)
    assert {type(error) for error in errors} == {far.SymmetricMemoryError}
    assert len({str(error) for error in errors}) == 1
    assert f"{step} failed on 1 of 3 ranks: rank {failing} on host" in str(errors[0])
    assert "JitError: no compiler today" in str(errors[0])
    assert isinstance(errors[failing].__cause__, far.JitError)
    assert [memory.peers for memory in memories] == [()] * (0 if function == "substrate_of" else 3)
    check(3, [random_call(3, 2, 64, bf16)], CPU)


# Life


@pytest.mark.parametrize(
    "strategy", [Strategy.ONESHOT, Strategy.TWOSHOT], ids=lambda strategy: strategy.name
)
def test_every_slot_is_armed_after_any_call_and_epochs_wrap(strategy, device):
    """The epoch starts four calls before its 16 bits run over."""
    calls = [
        random_call(3, num_tokens, 64, bf16, seed=i, strategy=strategy)
        for i, num_tokens in enumerate((1, 70, 3, 128, 2, 9, 1, 64))
    ]

    def rank_main(comm):
        rank, armed, outputs = comm.Get_rank(), [], []
        with stream_of_rank(device), open_workspace(comm, device) as workspace:
            workspace._substrate.fill(workspace._substrate.control, 4, (65536 - 4) << 16)
            for call in calls:
                inputs = call.inputs[rank].to(device)
                output = torch.empty_like(inputs)
                comm.barrier()
                far.trtllm_mnnvl_allreduce(inputs, workspace, False, output, strategy)
                workspace.synchronize()
                comm.barrier()  # peers may publish again only after this rank has looked
                armed.append(is_armed(workspace) and epoch_word(workspace) % (1 << 16) == 0)
                outputs.append((output.cpu(),))
            assert epoch_word(workspace) == (len(calls) - 4) << 16
        return armed, outputs

    for rank, (armed, outputs) in enumerate(far.run_ranks(3, rank_main)):
        assert armed == [True] * len(calls)
        assert_outputs_equal(outputs, [call.expected() for call in calls], f"rank {rank}")


def test_close_is_safe_twice_and_a_closed_workspace_is_refused(device):
    def rank_main(comm):
        workspace = open_workspace(comm, device)
        assert workspace.is_open
        for close in (workspace.close, workspace.close, workspace.destroy):
            close()
            assert not workspace.is_open
        with pytest.raises(ValueError, match="workspace: it is closed"):
            far.trtllm_mnnvl_allreduce(
                torch.zeros(1, 8, dtype=bf16, device=device), workspace, False
            )

    far.run_ranks(2, rank_main)


def test_two_workspaces_take_turns(device):
    calls = [random_call(2, n, 64, bf16, seed=n, strategy=Strategy.TWOSHOT) for n in range(1, 13)]

    def rank_main(comm):
        rank = comm.Get_rank()
        with (
            stream_of_rank(device),
            open_workspace(comm, device) as first,
            open_workspace(comm, device, buffer_size_in_bytes=32768) as second,
        ):
            inputs = [call.inputs[rank].to(device) for call in calls]
            outputs = [torch.empty_like(each) for each in inputs]
            comm.barrier()
            for i, workspace in enumerate([first, second, first, first, second, second] * 2):
                far.trtllm_mnnvl_allreduce(
                    inputs[i], workspace, False, outputs[i], calls[i].strategy
                )
            first.synchronize()
            second.synchronize()
            return [(output.cpu(),) for output in outputs]

    for rank, outputs in enumerate(far.run_ranks(2, rank_main)):
        assert_outputs_equal(outputs, [call.expected() for call in calls], f"rank {rank}")


@pytest.mark.parametrize("whole_world", [True, False])
def test_tensor_parallel_groups_of_a_larger_world(whole_world, device):
    """Ranks 0, 1 and ranks 2, 3 sum among themselves, whichever group the caller hands over."""
    calls = [random_call(2, 3, 64, bf16, seed=group) for group in range(2)]

    def rank_main(comm):
        rank = comm.Get_rank()
        mapping = far.Mapping(4, rank, tp_size=2, pp_size=2)
        group = comm if whole_world else comm.Split(mapping.pp_rank, mapping.tp_rank)
        with stream_of_rank(device), open_workspace(group, device, mapping=mapping) as workspace:
            assert (workspace.world_size, workspace.rank) == (2, rank % 2)
            inputs = calls[rank // 2].inputs[rank % 2].to(device)
            output = torch.empty_like(inputs)
            comm.barrier()
            far.trtllm_mnnvl_allreduce(inputs, workspace, False, output)
            workspace.synchronize()
            return (output.cpu(),)

    for rank, output in enumerate(far.run_ranks(4, rank_main)):
        assert_outputs_equal([output], [calls[rank // 2].expected()], f"rank {rank}")


def test_a_group_of_another_size_is_refused():
    def rank_main(comm):
        mapping = far.Mapping(6, comm.Get_rank(), tp_size=2, pp_size=3)
        with pytest.raises(
            ValueError, match=r"comm_backend: rank \d of 3; allowed is rank \d of 2"
        ):
            open_workspace(comm, mapping=mapping)

    far.run_ranks(3, rank_main)
