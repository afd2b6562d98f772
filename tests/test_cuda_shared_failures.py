"""CUDA memory between ranks when a driver call, a vote or a peer fails at any point of its making.

Every failure of one rank is everybody's: one text on all ranks within seconds, nothing left over,
and the next attempt works.
"""

from __future__ import annotations

import itertools
import time

import pytest
from fake_machine import Code
from fake_ranks import FakeRanks, machine_room, num_fds
from workspace_tools import outcomes, this_rank

import flashinfer_ar as far
from flashinfer_ar.bootstrap import CommBackend, agreement
from flashinfer_ar.errors import BootstrapError, CudaError, SymmetricMemoryError
from flashinfer_ar.memory import cuda_shared

NOT_READY = Code.CUDA_ERROR_SYSTEM_NOT_READY
CODES = [
    Code.CUDA_ERROR_INVALID_DEVICE,
    Code.CUDA_ERROR_INVALID_HANDLE,
    Code.CUDA_ERROR_ILLEGAL_STATE,
    Code.CUDA_ERROR_NOT_PERMITTED,
    Code.CUDA_ERROR_NOT_SUPPORTED,
    Code.CUDA_ERROR_OUT_OF_MEMORY,
]
REFUSALS = CODES[3:5]
PATHS = pytest.mark.parametrize("hosts", ["aaa", "aab"], ids=["fd", "fabric"], indirect=True)
NUM_RANKS = 3


@pytest.fixture
def world():
    with machine_room() as folder:
        yield folder


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(cuda_shared, "_PAUSE_S", 0.0)


@pytest.fixture
def hosts(request, monkeypatch):
    """A letter a rank; votes name the host that a rank pretends to be on."""
    monkeypatch.setattr(agreement.socket, "gethostname", lambda: request.param[this_rank()])
    return request.param


def healthy_calls(world, hosts):
    """The names of a rank's driver calls while memory is made and nothing fails."""
    ranks = FakeRanks(world, hosts)
    memories = far.run_ranks(NUM_RANKS, ranks.allocate)
    names = [call for call, *_ in ranks.drivers[1].log]
    for memory in memories:
        memory.close()
    return names


def points(names):
    """(call, nth, whether it is one of the probe's) of each call."""
    probe_end = names.index("cuCtxPopCurrent")
    for place, name in enumerate(names):
        yield name, names[: place + 1].count(name), place <= probe_end


def assert_one_text(raised, *parts):
    assert [type(each) for each in raised] == [SymmetricMemoryError] * NUM_RANKS, raised
    assert len({str(each) for each in raised}) == 1, raised
    assert all(part in str(raised[0]) for part in parts), (parts, raised[0])


def assert_clean_and_able(ranks, fds):
    ranks.check_balanced()
    assert num_fds() == fds
    for driver in ranks.drivers:
        driver.heal()
    far.run_ranks(NUM_RANKS, lambda comm: ranks.allocate(comm).close())
    ranks.check_balanced()


def falls_back(hosts, code, in_probe):
    return in_probe and code in REFUSALS and hosts == "aaa"


def assert_failure_is_everybodys(world, hosts, point, code, rank):
    (call, nth, in_probe), fds = point, num_fds()
    ranks = FakeRanks(world, hosts)
    ranks.drivers[rank].fail(call, code, nth=nth)
    started = time.monotonic()
    raised = outcomes(NUM_RANKS, lambda comm: ranks.allocate(comm).close())
    assert time.monotonic() - started < 5.0
    if falls_back(hosts, code, in_probe):
        assert raised == [None] * NUM_RANKS
    else:
        host, bus_id = ranks.hosts[rank], ranks.devices[rank].place.pci_bus_id
        who = f"rank {rank} on host {host}: CudaError: device {bus_id}: "
        assert_one_text(raised, who + f"{call} answered {code.name} ({int(code)})")
    assert_clean_and_able(ranks, fds)


@PATHS
@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_failure_of_any_call_is_everybodys(world, hosts, rank):
    """Each call that a rank makes, in turn; the codes in turn too."""
    codes = itertools.cycle(CODES)
    for point in points(healthy_calls(world, hosts)):
        assert_failure_is_everybodys(world, hosts, point, next(codes), rank)


@PATHS
@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_a_failure_with_any_code_is_everybodys(world, hosts, code):
    """Each call by name, the last of its kind; the ranks in turn."""
    ranks = itertools.cycle(range(NUM_RANKS))
    last = {point[0]: point for point in points(healthy_calls(world, hosts))}
    for point in last.values():
        assert_failure_is_everybodys(world, hosts, point, code, next(ranks))


@PATHS
@pytest.mark.parametrize("call", ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"])
def test_the_first_failure_is_reported_if_taking_back_fails_too(world, hosts, call):
    ranks, fds = FakeRanks(world, hosts), num_fds()
    driver = ranks.drivers[1]
    driver.fail("cuMemSetAccess", Code.CUDA_ERROR_ILLEGAL_STATE, nth=2)
    has_failed = lambda *_: bool(driver.calls("cuMemSetAccess"))  # noqa: E731
    driver.fail(call, Code.CUDA_ERROR_UNKNOWN, times=None, when=has_failed)
    raised = outcomes(NUM_RANKS, ranks.allocate)
    assert_one_text(raised, "cuMemSetAccess answered CUDA_ERROR_ILLEGAL_STATE (401)")
    assert call not in str(raised[0])
    assert_clean_and_able(ranks, fds)


@PATHS
@pytest.mark.parametrize("nth", [1, 2], ids=["probe", "block"])
def test_a_failure_outside_the_driver_is_everybodys_too(world, hosts, nth, monkeypatch):
    ranks, fds = FakeRanks(world, hosts), num_fds()
    export, calls = ranks.drivers[1].cuMemExportToShareableHandle, itertools.count(1)

    def cuMemExportToShareableHandle(*arguments):
        if next(calls) == nth:
            raise OSError("too many open files")
        return export(*arguments)

    monkeypatch.setattr(ranks.drivers[1], export.__name__, cuMemExportToShareableHandle, False)
    raised = outcomes(NUM_RANKS, ranks.allocate, timeout_s=5.0)
    assert_one_text(raised, "rank 1 on host a: OSError: too many open files")
    assert_clean_and_able(ranks, fds)


# ---- Not ready ------------------------------------------------------------------------------


@PATHS
def test_not_ready_is_tried_again_by_all_ranks_together(world, hosts):
    for rank, (call, nth, _) in enumerate(points(healthy_calls(world, hosts))):
        ranks = FakeRanks(world, hosts)
        ranks.drivers[rank % NUM_RANKS].fail(call, NOT_READY, nth=nth)
        far.run_ranks(NUM_RANKS, lambda comm, ranks=ranks: ranks.allocate(comm).close())
        tries = [len(driver.calls("cuMemGetAllocationGranularity")) for driver in ranks.drivers]
        assert max(tries) > 2, (call, nth)
        assert max(tries) - min(tries) <= 1, (call, nth, tries)  # it failed before asking
        ranks.check_balanced()


@PATHS
@pytest.mark.parametrize(
    ("call", "nth"), [("cuMemCreate", 1), ("cuMemCreate", 2), ("cuMemImportFromShareableHandle", 1)]
)
def test_not_ready_is_not_waited_for_for_ever(world, hosts, call, nth, monkeypatch):
    pauses = []
    monkeypatch.setattr(cuda_shared.time, "sleep", pauses.append)
    ranks, fds = FakeRanks(world, hosts), num_fds()
    ranks.drivers[1].fail(call, NOT_READY, nth=nth, times=None)
    raised = outcomes(NUM_RANKS, ranks.allocate)
    assert_one_text(raised, f"rank 1 on host a: CudaError: device 0000:02:00.0: {call} answered")
    assert_one_text(raised, "CUDA_ERROR_SYSTEM_NOT_READY (802)")
    assert pauses == [0.0] * (NUM_RANKS * (cuda_shared._NUM_TRIES - 1))
    assert_clean_and_able(ranks, fds)


def test_other_codes_are_not_tried_again(world):
    ranks = FakeRanks(world, "aab")
    ranks.drivers[1].fail("cuMemImportFromShareableHandle", Code.CUDA_ERROR_UNKNOWN)
    outcomes(NUM_RANKS, ranks.allocate)
    assert len(ranks.drivers[1].calls("cuMemImportFromShareableHandle")) == 1


# ---- Memory that is put back behind its addresses, and the end ------------------------------


@PATHS
@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_failure_to_map_again_leaves_the_addresses(world, hosts, rank):
    names = healthy_calls(world, hosts)
    again = names[names.index("cuMemAddressReserve") + 2 :]
    for call, nth, _ in points(again):
        ranks, fds = FakeRanks(world, hosts), num_fds()

        def rank_main(comm, ranks=ranks, call=call, nth=nth):
            memory = ranks.allocate(comm)
            before, driver = memory.peers, ranks.drivers[comm.Get_rank()]
            memory.unmap()
            if comm.Get_rank() == rank:
                driver.fail(call, Code.CUDA_ERROR_UNKNOWN, nth=nth)
            with pytest.raises(SymmetricMemoryError) as caught:
                memory.map(comm)
            assert not driver.mapped
            driver.heal()
            memory.map(comm)
            assert memory.peers == before
            assert len(driver.mapped) == NUM_RANKS
            memory.close()
            return str(caught.value)

        texts = far.run_ranks(NUM_RANKS, rank_main)
        assert len(set(texts)) == 1, texts
        assert f"{call} answered CUDA_ERROR_UNKNOWN (999)" in texts[0]
        assert_clean_and_able(ranks, fds)


@PATHS
@pytest.mark.parametrize("call", ["cuMemUnmap", "cuMemAddressFree", "cuCtxPopCurrent"])
def test_a_failing_close_gives_back_the_rest(world, hosts, call):
    ranks, fds = FakeRanks(world, hosts), num_fds()

    def rank_main(comm):
        memory = ranks.allocate(comm)
        if comm.Get_rank() == 1:
            ranks.drivers[1].fail(call, Code.CUDA_ERROR_UNKNOWN)
        memory.close()

    raised = outcomes(NUM_RANKS, rank_main)
    assert raised[0] is raised[2] is None
    assert isinstance(raised[1], CudaError)
    assert f"device 0000:02:00.0: {call} answered CUDA_ERROR_UNKNOWN (999)" in str(raised[1])
    assert_clean_and_able(ranks, fds)


# ---- Peers that get lost --------------------------------------------------------------------


class FailingComm(CommBackend):
    """A group whose ``nth`` allgather, counted from 1, fails on this rank."""

    def __init__(self, comm: CommBackend, nth: int) -> None:
        self._comm, self._nth, self.count = comm, nth, 0

    def Get_rank(self) -> int:
        return self._comm.Get_rank()

    def Get_size(self) -> int:
        return self._comm.Get_size()

    def allgather(self, obj):
        self.count += 1
        if self.count == self._nth:
            raise BootstrapError("the network is gone")
        return self._comm.allgather(obj)

    def Split(self, color: int, key: int) -> CommBackend:
        raise NotImplementedError


def num_collectives(ranks):
    def rank_main(comm):
        counting = FailingComm(comm, 0)
        ranks.allocate(counting).close()
        return counting.count

    return far.run_ranks(NUM_RANKS, rank_main)[0]


@PATHS
@pytest.mark.parametrize("lost", [[1], [0, 1, 2]], ids=["one rank", "all ranks"])
def test_a_group_that_breaks_leaves_nothing(world, hosts, lost):
    total = num_collectives(FakeRanks(world, hosts))
    assert total > 6
    for nth in range(1, total + 1):
        ranks, fds = FakeRanks(world, hosts), num_fds()

        def rank_main(comm, ranks=ranks, nth=nth):
            # The first to fail ends the run for its peers, as a rank's death does.
            ranks.allocate(FailingComm(comm, nth if comm.Get_rank() in lost else 0))

        with pytest.raises(BootstrapError, match="the network is gone"):
            far.run_ranks(NUM_RANKS, rank_main, timeout_s=10.0)
        assert_clean_and_able(ranks, fds)
