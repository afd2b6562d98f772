"""Multicast objects, on the fake driver alone: never on a GPU.

All ranks get one, or all of them raise one text with nothing left over.
"""

from __future__ import annotations

import contextlib

import pytest
from fake_machine import FABRIC, FD, MULTICAST_GRANULARITY, Attribute, Code
from fake_ranks import FakeRanks, machine_room, num_fds
from workspace_tools import outcomes, this_rank

import flashinfer_ar as far
from flashinfer_ar import env
from flashinfer_ar.bootstrap import agreed_step, agreement
from flashinfer_ar.driver import checked
from flashinfer_ar.errors import SymmetricMemoryError
from flashinfer_ar.memory import multicast

SUPPORTED = Attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
SIZE = MULTICAST_GRANULARITY[0]
NUM_RANKS = 4
CODES = [
    Code.CUDA_ERROR_INVALID_DEVICE,
    Code.CUDA_ERROR_ILLEGAL_STATE,
    Code.CUDA_ERROR_NOT_SUPPORTED,
    Code.CUDA_ERROR_OUT_OF_MEMORY,
]


@pytest.fixture(params=["aaaa", "aabb"], ids=["fd", "fabric"])
def ranks(request, monkeypatch):
    with machine_room() as folder:
        made = FakeRanks(folder, request.param)
        for driver in made.drivers:
            driver.attributes[SUPPORTED] = 1
        monkeypatch.setattr(agreement.socket, "gethostname", lambda: made.hosts[this_rank()])
        yield made


@contextlib.contextmanager
def own_block(ranks, rank):
    """A handle of memory of the rank's own, as the symmetric memory has it while it is made."""
    device = ranks.devices[rank]
    api = device.api
    properties = api.CUmemAllocationProp()
    properties.location.id = device.ordinal
    properties.requestedHandleTypes = kind_of(ranks)
    with device.current():
        handle = checked(api.cuMemCreate, SIZE, properties, 0)
    try:
        yield handle
    finally:
        checked(api.cuMemRelease, handle)


def kind_of(ranks):
    return FD if len(set(ranks.hosts)) == 1 else FABRIC


@contextlib.contextmanager
def attached(comm, ranks):
    device = ranks.devices[comm.Get_rank()]
    with own_block(ranks, comm.Get_rank()) as block, contextlib.ExitStack() as stack:
        with agreed_step(comm, "reserve an address"), device.current():
            made = multicast.Multicast(device, kind_of(ranks), SIZE, NUM_RANKS)
            stack.callback(made.close)
        made.attach(comm, block)
        yield made


def attach_and_close(comm, ranks):
    with attached(comm, ranks):
        pass


def healthy_calls(ranks):
    with machine_room() as folder:
        well = FakeRanks(folder, ranks.hosts)
        for driver in well.drivers:
            driver.attributes[SUPPORTED] = 1

        def rank_main(comm):
            with attached(comm, well):
                return [call for call, *_ in well.drivers[comm.Get_rank()].log]

        return far.run_ranks(NUM_RANKS, rank_main)


def test_every_rank_binds_its_block_and_maps_one_object(ranks):
    fds = num_fds()

    def rank_main(comm):
        driver = ranks.drivers[comm.Get_rank()]
        with attached(comm, ranks) as made:
            assert made.address % SIZE == 0
            assert driver.mapped == {made.address: SIZE}
            address = made.address
            made.detach()
            made.detach()
            assert driver.mapped == {}
            with own_block(ranks, comm.Get_rank()) as block:
                made.attach(comm, block)
                assert made.address == address
                assert driver.mapped == {address: SIZE}

    far.run_ranks(NUM_RANKS, rank_main)
    for rank, driver in enumerate(ranks.drivers):
        assert len(driver.calls("cuMulticastCreate")) == (2 if rank == 0 else 0)
        assert len(driver.calls("cuMulticastBindMem")) == 2
    ranks.check_balanced()
    assert num_fds() == fds


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_failure_of_any_call_is_everybodys(ranks, rank):
    names = healthy_calls(ranks)[rank]
    first = names.index("cuMulticastGetGranularity") - 1  # what is before is the test's own
    for place in range(first, len(names)):
        call, nth, code = names[place], names[: place + 1].count(names[place]), CODES[place % 4]
        fds = num_fds()
        ranks.drivers[rank].fail(call, code, nth=nth)
        raised = outcomes(NUM_RANKS, lambda comm: attach_and_close(comm, ranks), timeout_s=5.0)
        texts = {str(each) for each in raised}
        assert len(texts) == 1, (call, nth, texts)
        assert isinstance(raised[0], SymmetricMemoryError)
        bus_id = ranks.devices[rank].place.pci_bus_id
        who = f"rank {rank} on host {ranks.hosts[rank]}: CudaError: device {bus_id}: {call}"
        assert f"{who} answered {code.name} ({int(code)})" in texts.pop(), (call, nth)
        ranks.drivers[rank].heal()
        ranks.check_balanced()
        assert num_fds() == fds
    far.run_ranks(NUM_RANKS, lambda comm: attach_and_close(comm, ranks))


# ---- Whether to have one --------------------------------------------------------------------


def wanted(ranks):
    answers = far.run_ranks(
        NUM_RANKS, lambda comm: multicast.is_wanted(comm, ranks.devices[comm.Get_rank()])
    )
    assert len(set(answers)) == 1, answers
    ranks.check_balanced()
    return answers[0]


def test_all_devices_must_have_it(ranks):
    assert wanted(ranks)
    ranks.drivers[2].attributes[SUPPORTED] = 0
    assert not wanted(ranks)


def test_a_switch_on_one_rank_is_everybodys(ranks, monkeypatch):
    monkeypatch.setattr(
        env, "multicast_switched_off_by", lambda: "A=1" if this_rank() == 3 else None
    )
    assert not wanted(ranks)


@pytest.mark.parametrize("call", ["cuDeviceGetAttribute", "cuCtxPushCurrent", "cuCtxPopCurrent"])
def test_a_device_that_does_not_answer_is_everybodys_error(ranks, call):
    ranks.drivers[1].fail(call, Code.CUDA_ERROR_INVALID_DEVICE)
    raised = outcomes(
        NUM_RANKS, lambda comm: multicast.is_wanted(comm, ranks.devices[comm.Get_rank()])
    )
    texts = {str(each) for each in raised}
    assert len(texts) == 1, texts
    assert f"{call} answered CUDA_ERROR_INVALID_DEVICE (101)" in texts.pop()
    ranks.check_balanced()
