"""Multicast as part of symmetric memory: all ranks store through one address, or all by unicast.

On the fake driver alone: a multicast object is never made on a GPU here.
"""

from __future__ import annotations

import pytest
import torch
from fake_machine import Attribute, Code
from fake_ranks import FakeCudaSubstrate, FakeRanks, machine_room
from harness import assert_outputs_equal, random_call, run_on_rank
from workspace_tools import outcomes, this_rank

import flashinfer_ar as far
from flashinfer_ar import env
from flashinfer_ar import workspace as workspace_module

SUPPORTED = Attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
CALLS = (
    "cuMulticastCreate",
    "cuMulticastAddDevice",
    "cuMulticastBindMem",
)


@pytest.fixture(params=["aaaa", "aabb"], ids=["fd", "fabric"])
def ranks(request):
    with machine_room() as folder:
        made = FakeRanks(folder, request.param)
        for driver in made.drivers:
            driver.attributes[SUPPORTED] = 1
        yield made


def addresses(ranks):
    """Each rank's multicast address after creation, and again after unmap and map."""

    def rank_main(comm):
        memory = ranks.allocate(comm)
        before = memory.multicast
        comm.barrier()
        memory.unmap()
        comm.barrier()
        memory.map(comm)
        assert memory.multicast == before
        comm.barrier()
        memory.close()
        return before

    found = far.run_ranks(len(ranks), rank_main)
    ranks.check_balanced()
    return found


def test_every_rank_has_an_address(ranks):
    found = addresses(ranks)
    assert all(found)
    created = [len(driver.calls("cuMulticastCreate")) for driver in ranks.drivers]
    assert created == [2, 0, 0, 0]  # by rank 0 alone, and again after the memory had gone


@pytest.mark.parametrize("lacking", [0, 3])
def test_one_device_without_multicast(ranks, lacking):
    ranks.drivers[lacking].attributes[SUPPORTED] = 0
    assert addresses(ranks) == [None] * 4
    assert not any(driver.calls("cuMulticastCreate") for driver in ranks.drivers)


def test_one_rank_with_a_switch(ranks, monkeypatch):
    monkeypatch.setattr(
        env, "multicast_switched_off_by", lambda: "NCCL_NVLS_ENABLE=0" if this_rank() == 2 else None
    )
    assert addresses(ranks) == [None] * 4
    assert not any(driver.calls("cuMulticastCreate") for driver in ranks.drivers)


@pytest.mark.parametrize(("call", "rank"), [(CALLS[0], 0), (CALLS[1], 3), (CALLS[2], 2)])
def test_a_failure_turns_multicast_off_for_all(ranks, call, rank, caplog):
    ranks.drivers[rank].fail(call, Code.CUDA_ERROR_NOT_SUPPORTED, times=None)
    assert addresses(ranks) == [None] * 4
    assert f"{call} answered CUDA_ERROR_NOT_SUPPORTED (801)" in caplog.text
    assert f"rank {rank} on host" in caplog.text


@pytest.mark.parametrize(("call", "rank"), [(CALLS[0], 0), (CALLS[2], 2)])
def test_after_a_failure_calls_are_right(ranks, call, rank, monkeypatch):
    """No kernel may store to an address that is not there."""
    ranks.drivers[rank].fail(call, Code.CUDA_ERROR_NOT_SUPPORTED, times=None)
    monkeypatch.setattr(
        workspace_module,
        "substrate_of",
        lambda device: FakeCudaSubstrate(ranks.devices[this_rank()]),
    )
    calls = [random_call(4, 3, 64, torch.bfloat16, fused=fused) for fused in (False, True)]
    expected = [one.expected() for one in calls]
    results = far.run_ranks(4, lambda comm: run_on_rank(comm, calls, torch.device("cpu")))
    for outputs in results:
        assert_outputs_equal(outputs, expected, call)
    ranks.check_balanced()


def test_what_is_in_use_must_come_back(ranks):
    """Captured graphs store to the multicast address: without it, restoring fails, on all ranks."""

    def rank_main(comm):
        memory = ranks.allocate(comm)
        memory.unmap()
        comm.barrier()
        if comm.Get_rank() == 0:
            ranks.drivers[2].fail(CALLS[2], Code.CUDA_ERROR_NOT_SUPPORTED)
        comm.barrier()
        try:
            memory.map(comm)
        finally:
            memory.close()

    errors = outcomes(4, rank_main)
    assert {type(error) for error in errors} == {far.SymmetricMemoryError}
    assert len({str(error) for error in errors}) == 1
    ranks.check_balanced()
