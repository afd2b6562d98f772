"""CUDA memory between ranks, on the fake driver: its paths, and what it refuses."""

from __future__ import annotations

import ctypes
import time

import pytest
from fake_machine import FABRIC, FD, GRANULARITY, Code
from fake_ranks import RACK, FakeCudaSubstrate, FakeRanks, machine_room, num_fds
from harness import DTYPES, Strategy, check, random_call
from workspace_tools import CPU, outcomes, this_rank

import flashinfer_ar as far
from flashinfer_ar import env, workspace
from flashinfer_ar.errors import SymmetricMemoryError
from flashinfer_ar.memory.topology import FabricPlace

REFUSALS = [
    Code.CUDA_ERROR_NOT_PERMITTED,
    Code.CUDA_ERROR_NOT_SUPPORTED,
    Code.CUDA_ERROR_INVALID_VALUE,
]


@pytest.fixture
def world():
    with machine_room() as folder:
        yield folder


def shared_as(ranks):
    """The handle types by which memory was handed over for good, on all ranks together."""
    return {
        kind for each in ranks.drivers for _, kind in each.calls("cuMemImportFromShareableHandle")
    }


def all_raise(ranks, rank_main):
    """The one text of the error that all ranks raise."""
    raised = outcomes(len(ranks), rank_main)
    assert [type(each) for each in raised] == [SymmetricMemoryError] * len(ranks), raised
    assert len({str(each) for each in raised}) == 1, raised
    return str(raised[0])


def marks_reach_every_block(comm, memory):
    """Every rank leaves a mark of its own in every block, and finds all marks in its own."""
    rank, world_size = comm.Get_rank(), comm.Get_size()
    for peer, address in enumerate(memory.peers):
        ctypes.memset(address + memory.size_bytes - 1 - rank, 1 + 16 * rank + peer, 1)
    comm.barrier()
    found = ctypes.string_at(memory.local + memory.size_bytes - world_size, world_size)
    comm.barrier()
    return list(reversed(found)) == [1 + 16 * peer + rank for peer in range(world_size)]


@pytest.mark.parametrize(
    ("hosts", "kinds"),
    [
        ("a", set()),
        ("aa", {FD}),
        ("aaaa", {FD}),
        ("ab", {FABRIC}),
        ("aab", {FABRIC}),
        ("abcd", {FABRIC}),
        ("aabbccdd", {FABRIC}),
    ],
)
def test_every_rank_reaches_every_block(world, hosts, kinds):
    ranks, fds = FakeRanks(world, hosts), num_fds()

    def rank_main(comm):
        memory = ranks.allocate(comm, GRANULARITY + 1)
        assert memory.size_bytes == GRANULARITY + 1
        assert memory.local == memory.peers[comm.Get_rank()]
        assert [at - memory.peers[0] for at in memory.peers] == [
            2 * GRANULARITY * peer for peer in range(len(hosts))
        ]
        assert marks_reach_every_block(comm, memory)
        is_own = ranks.drivers[comm.Get_rank()].is_own
        assert is_own == {address: address == memory.local for address in memory.peers}
        memory.close()
        memory.close()
        return memory.peers, memory.local

    assert far.run_ranks(len(hosts), rank_main) == [((), 0)] * len(hosts)
    assert shared_as(ranks) == kinds
    ranks.check_balanced()
    assert num_fds() == fds


def test_a_block_outlives_its_owners_close(world):
    ranks = FakeRanks(world, "ab")

    def rank_main(comm):
        memory = ranks.allocate(comm)
        ctypes.memset(memory.local, 7, 4096)
        comm.barrier()
        if comm.Get_rank() == 0:
            memory.close()
        comm.barrier()
        if comm.Get_rank() == 1:
            assert ctypes.string_at(memory.peers[0], 4096) == b"\7" * 4096
            memory.close()

    far.run_ranks(2, rank_main)
    ranks.check_balanced()


@pytest.mark.parametrize("hosts", ["aaa", "aab"])
def test_memory_goes_and_comes_back_at_its_addresses(world, hosts):
    ranks = FakeRanks(world, hosts)

    def rank_main(comm):
        memory = ranks.allocate(comm)
        before = memory.peers
        for _ in range(2):
            memory.unmap()
            memory.unmap()
            assert not ranks.drivers[comm.Get_rank()].mapped
            memory.map(comm)
            assert memory.peers == before
            assert ctypes.string_at(memory.local, 4096) == bytes(4096), "the old memory"
            comm.barrier()
            assert marks_reach_every_block(comm, memory)
        memory.unmap()
        memory.close()

    far.run_ranks(3, rank_main)
    ranks.check_balanced()


@pytest.mark.parametrize("hosts", ["aaaa", "aabb", "abcd"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_are_right_on_memory_of_each_path(world, hosts, dtype, monkeypatch):
    ranks = FakeRanks(world, hosts)
    monkeypatch.setattr(
        workspace, "substrate_of", lambda device: FakeCudaSubstrate(ranks.devices[this_rank()])
    )
    shapes = ((1, 256), (5, 64), (2, 64), (1, 256))
    calls = [
        random_call(len(ranks), *shape, dtype, fused=fused, seed=seed, strategy=strategy)
        for seed, shape in enumerate(shapes)
        for fused, strategy in ((True, Strategy.ONESHOT), (False, Strategy.TWOSHOT))
    ]
    check(len(ranks), calls, CPU)
    assert shared_as(ranks) == ({FD} if hosts == "aaaa" else {FABRIC})
    ranks.check_balanced()


# ---- Which kind of handle -------------------------------------------------------------------


@pytest.mark.parametrize("code", REFUSALS, ids=lambda code: code.name)
@pytest.mark.parametrize(("refused", "used"), [(FABRIC, FD), (FD, FABRIC)], ids=["fd", "fabric"])
@pytest.mark.parametrize("who", [[0], [2], [0, 1, 2]], ids=str)
def test_on_one_host_all_ranks_take_the_kind_that_all_have(world, code, refused, used, who):
    ranks = FakeRanks(world, "aaa")
    for rank in who:
        ranks.drivers[rank].refuse(refused, code)

    far.run_ranks(3, lambda comm: ranks.allocate(comm).close())
    assert shared_as(ranks) == {used}
    ranks.check_balanced()


def test_on_one_host_the_error_has_both_kinds(world):
    ranks = FakeRanks(world, "aaa", fabric=None)
    ranks.drivers[1].refuse(FD, Code.CUDA_ERROR_NOT_SUPPORTED)
    text = all_raise(ranks, ranks.allocate)
    assert (
        "POSIX file descriptors: rank 1 on host a: CudaError: device 0000:02:00.0: cuMemCreate "
        "answered CUDA_ERROR_NOT_SUPPORTED (801); fabric handles: rank 0 on host a: CudaError: "
        "device 0000:01:00.0: cuMemCreate answered CUDA_ERROR_NOT_PERMITTED (800); "
    ) in text
    assert "IMEX" not in text
    ranks.check_balanced()


@pytest.mark.parametrize("code", REFUSALS, ids=lambda code: code.name)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_between_hosts_a_refusal_names_imex(world, code, rank):
    ranks = FakeRanks(world, "aab")
    ranks.drivers[rank].refuse(FABRIC, code)
    text = all_raise(ranks, ranks.allocate)
    assert f"rank {rank} on host {ranks.hosts[rank]}" in text
    assert f"{code.name} ({int(code)})" in text
    assert "IMEX channel" in text
    ranks.check_balanced()


@pytest.mark.parametrize("hosts", ["aaa", "aab"])
@pytest.mark.parametrize("nth", [1, 2], ids=["probe", "block"])
def test_a_full_device_is_reported_as_such(world, hosts, nth):
    ranks = FakeRanks(world, hosts)
    ranks.drivers[2].fail("cuMemCreate", Code.CUDA_ERROR_OUT_OF_MEMORY, nth=nth)
    text = all_raise(ranks, ranks.allocate)
    assert "cuMemCreate answered CUDA_ERROR_OUT_OF_MEMORY (2)" in text
    assert "IMEX" not in text
    assert len(ranks.drivers[0].calls("cuMemCreate")) == nth, "another kind was tried"
    ranks.check_balanced()


# ---- What could never work ------------------------------------------------------------------


def test_two_ranks_on_one_device_are_refused(world, monkeypatch):
    ranks = FakeRanks(world, "aaa")
    ranks.devices[2] = ranks.devices[0]
    text = all_raise(ranks, ranks.allocate)
    assert text.startswith("ranks [0, 2] do not have a device of their own: rank 0: host a, device")
    # The switch has to be on for every rank.
    monkeypatch.setattr(env, "allow_shared_device", lambda: this_rank() != 1)
    assert all_raise(ranks, ranks.allocate) == text
    assert ranks.drivers[1].log == []


def test_two_ranks_may_share_a_device_with_the_switch(world, monkeypatch):
    monkeypatch.setenv("FLASHINFER_AR_ALLOW_SHARED_DEVICE", "1")
    ranks, twin = FakeRanks(world, "aa"), FakeRanks(world, "a")
    ranks.drivers[1], ranks.devices[1] = twin.drivers[0], twin.devices[0]

    def rank_main(comm):
        memory = ranks.allocate(comm)
        assert marks_reach_every_block(comm, memory)
        memory.close()

    far.run_ranks(2, rank_main)
    ranks.check_balanced()


def test_equal_device_names_on_two_hosts_are_two_devices(world):
    ranks = FakeRanks(world, "ab")
    assert ranks.devices[0].ordinal == ranks.devices[1].ordinal
    far.run_ranks(2, lambda comm: ranks.allocate(comm).close())
    ranks.check_balanced()


@pytest.mark.parametrize(
    "fabrics",
    [
        [None, None, None],
        [RACK, RACK, None],
        [RACK, RACK, FabricPlace("rack", 1)],
        [RACK, RACK, FabricPlace("another rack", 0)],
    ],
    ids=["none", "one without", "cliques", "clusters"],
)
def test_hosts_that_no_fabric_joins_are_refused_at_once(world, fabrics):
    started = time.monotonic()
    ranks = FakeRanks(world, "aab")
    ranks.devices = [
        FakeRanks(world, "aab", fabric).devices[rank] for rank, fabric in enumerate(fabrics)
    ]
    text = all_raise(ranks, ranks.allocate)
    assert "several hosts that no NVLink domain joins: rank 0: host a, device 0000:01" in text
    assert "rank 2: host b" in text
    assert [device.api.log for device in ranks.devices] == [[], [], []]
    assert time.monotonic() - started < 5.0


def test_ranks_that_ask_for_different_sizes_are_refused(world):
    ranks = FakeRanks(world, "aab")
    text = all_raise(ranks, lambda comm: ranks.allocate(comm, GRANULARITY * (1 + comm.Get_rank())))
    assert text.startswith("ranks disagree on the bytes of a block of CUDA memory: ")
    ranks.check_balanced()
