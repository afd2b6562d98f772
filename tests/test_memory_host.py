"""Host memory that ranks share: visibility, roll-back at every step, nothing left behind."""

import ctypes
import errno
import os
import stat
import threading
from pathlib import Path

import pytest
from bootstrap_worker import results

from flashinfer_ar.bootstrap import CommBackend, agreement, default_comm_backend, run_ranks
from flashinfer_ar.errors import BootstrapError, SymmetricMemoryError
from flashinfer_ar.memory import HostSharedMemory, InProcessMemory, host_shm, in_process

BOTH = pytest.mark.parametrize("kind", [HostSharedMemory, InProcessMemory])


def this_rank() -> int:
    return int(threading.current_thread().name.removeprefix("rank "))


def files() -> set[Path]:
    return set(Path("/dev/shm").glob("flashinfer_ar-*"))


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_mapped(address: int) -> bool:
    maps = Path("/proc/self/maps").read_text()
    spans = [line.split()[0].split("-") for line in maps.splitlines()]
    return any(int(first, 16) <= address < int(end, 16) for first, end in spans)


def raised(kind, comm: CommBackend, size_bytes: int = 4096) -> str:
    with pytest.raises(SymmetricMemoryError) as caught:
        kind.allocate(comm, size_bytes)
    return str(caught.value)


@BOTH
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_rank_reaches_every_block(kind, world_size):
    def write_everywhere(comm):
        rank = comm.Get_rank()
        memory = kind.allocate(comm, 12345)
        assert memory.size_bytes == 12345
        assert memory.multicast is None
        assert len(memory.peers) == world_size
        assert memory.local == memory.peers[rank]
        assert all(peer % 4096 == 0 for peer in memory.peers)
        assert ctypes.string_at(memory.local, 12345) == bytes(12345)
        comm.barrier()
        for peer, address in enumerate(memory.peers):
            ctypes.memset(address + 12345 - 1 - rank, 1 + 16 * rank + peer, 1)
        comm.barrier()
        read = ctypes.string_at(memory.local + 12345 - world_size, world_size)
        comm.barrier()
        memory.close()
        return list(reversed(read))

    expected = [[1 + 16 * rank + own for rank in range(world_size)] for own in range(world_size)]
    assert run_ranks(world_size, write_everywhere) == expected


@BOTH
def test_close_is_safe_twice_and_gives_everything_back(kind):
    fds = num_fds()
    memories = run_ranks(3, lambda comm: kind.allocate(comm, 1 << 20))
    addresses = memories[0].peers
    assert all(is_mapped(address) for address in addresses)
    for memory in memories:
        memory.close()
        memory.close()
        assert (memory.local, memory.peers) == (0, ())
    assert not any(is_mapped(address) for address in addresses)
    assert num_fds() == fds


@BOTH
def test_a_peer_that_closed_does_not_take_its_block_away(kind):
    memories = run_ranks(2, lambda comm: kind.allocate(comm, 4096))
    last, address = memories[1], memories[1].peers[0]
    memories[0].close()
    del memories
    ctypes.memset(address, 7, 4096)
    assert ctypes.string_at(address, 4096) == b"\x07" * 4096
    last.close()


def test_the_file_is_this_user_s_alone_and_gone_after(monkeypatch):
    real_map, modes = host_shm._map, []

    def look(path, size_bytes):
        modes.append(stat.S_IMODE(Path(path).stat().st_mode))
        return real_map(path, size_bytes)

    monkeypatch.setattr(host_shm, "_map", look)
    before = files()
    memories = run_ranks(2, lambda comm: HostSharedMemory.allocate(comm, 4096))
    assert modes == [0o600] * 4
    assert files() == before
    for memory in memories:
        memory.close()


STEPS = [
    (HostSharedMemory, host_shm, "host_identity", "identify the host"),
    (HostSharedMemory, host_shm, "_create", "create host shared memory"),
    (HostSharedMemory, host_shm, "_map", "map host shared memory"),
    (InProcessMemory, in_process, "_allocate", "allocate in-process memory"),
]


@pytest.mark.parametrize(("kind", "module", "function", "step"), STEPS)
@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("call", [0, 1])
def test_a_failure_is_everyone_s_and_leaves_nothing(
    kind, module, function, step, failing, call, monkeypatch
):
    real, calls = getattr(module, function), []

    def fail(*arguments):
        if this_rank() == failing:
            calls.append(arguments)
            if function != "_map" or len(calls) == 1 + call:  # its own block's, or a later one's
                raise OSError(errno.EACCES, "not today")
        return real(*arguments)

    files_before, fds_before = files(), num_fds()
    with monkeypatch.context() as patch:
        patch.setattr(module, function, fail)
        texts = run_ranks(3, lambda comm: raised(kind, comm), timeout_s=5.0)
    assert len(set(texts)) == 1
    assert f"{step} failed on 1 of 3 ranks: rank {failing} on host" in texts[0]
    assert "PermissionError: [Errno 13] not today" in texts[0]
    assert files() == files_before
    assert num_fds() == fds_before
    for memory in run_ranks(3, lambda comm: kind.allocate(comm, 4096)):
        memory.close()


def test_a_file_that_was_created_but_not_filled_goes_too(monkeypatch):
    def full(fd, offset, size_bytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    before, fds = files(), num_fds()
    monkeypatch.setattr(os, "posix_fallocate", full)
    texts = run_ranks(2, lambda comm: raised(HostSharedMemory, comm))
    assert "/dev/shm has no room for 4096 bytes (in a container: --shm-size)" in texts[0]
    assert (files(), num_fds()) == (before, fds)


def test_a_real_full_dev_shm_is_an_error_not_a_signal():
    free = os.statvfs("/dev/shm")
    too_much = free.f_frsize * free.f_blocks * 2
    before = files()
    (text,) = run_ranks(1, lambda comm: raised(HostSharedMemory, comm, too_much))
    assert f"no room for {too_much} bytes" in text
    assert files() == before


def test_a_rank_lost_on_the_way_leaves_no_file(monkeypatch):
    real_create, real_unlink = host_shm._create, host_shm._unlink

    def die(path, size_bytes):
        real_create(path, size_bytes)
        if this_rank() == 1:
            raise SystemExit  # no Exception, so no vote

    def unlink(paths):
        if this_rank() != 1:  # the dead clean up nothing
            real_unlink(paths)

    def allocate(comm):
        with pytest.raises((BootstrapError, SystemExit)):
            HostSharedMemory.allocate(comm, 4096)

    before = files()
    monkeypatch.setattr(host_shm, "_create", die)
    monkeypatch.setattr(host_shm, "_unlink", unlink)
    run_ranks(3, allocate, timeout_s=0.2)
    assert files() == before


@pytest.mark.parametrize("field", [{"boot_id": "other"}, {"shm_device": 1 << 20}])
def test_ranks_of_different_machines_are_refused(field, monkeypatch):
    def identity():
        real = agreement.host_identity()
        return real._replace(hostname="far", **field) if this_rank() == 2 else real

    monkeypatch.setattr(host_shm, "host_identity", identity)
    texts = run_ranks(3, lambda comm: raised(HostSharedMemory, comm))
    assert len(set(texts)) == 1
    assert "host shared memory is for ranks of one machine" in texts[0]
    assert "rank 2 on far" in texts[0]
    assert f"rank 0 on {agreement.host_identity().hostname}" in texts[0]


@BOTH
def test_ranks_must_ask_for_one_size(kind):
    texts = run_ranks(3, lambda comm: raised(kind, comm, 4096 + comm.Get_rank() // 2))
    assert texts == ["ranks disagree on size_bytes: 4096 on ranks 0; 1; 4097 on ranks 2"] * 3


@BOTH
@pytest.mark.parametrize("size_bytes", [0, -4096])
def test_a_size_below_one_is_refused(kind, size_bytes):
    with pytest.raises(ValueError, match=f"size_bytes={size_bytes}"):
        run_ranks(2, lambda comm: kind.allocate(comm, size_bytes))


def test_in_process_memory_refuses_a_group_of_processes():
    class Elsewhere:
        pass

    with pytest.raises(TypeError, match="InProcessBackend, not Elsewhere"):
        InProcessMemory.allocate(Elsewhere(), 4096)
    InProcessMemory.allocate(default_comm_backend(1), 4096).close()


@pytest.mark.parametrize("launcher", ["mpi", "torch"])
def test_between_processes(launcher):
    found = results(launcher, "memory")
    assert len({result["error"] for result in found}) == 1
    assert "map host shared memory failed on 1 of 3 ranks: rank 1" in found[0]["error"]
    for result in found:
        assert result["fresh"]
        assert result["read"] == [10, 11, 12]
        assert result["fds_left"] == 0
        assert result["names_left"] == []
