"""File descriptors between ranks that are late, fail, die or run on other hosts."""

import errno
import os
import resource
import signal
import stat
import threading
import time
from datetime import timedelta

import pytest
from fd_tools import (
    PROCESSES,
    Watched,
    nothing_left,
    open_fds,
    refused,
    refused_on_all,
    this_rank,
    trade,
    traded,
)

from flashinfer_ar.bootstrap import TorchDistBackend, host_identity, run_ranks
from flashinfer_ar.errors import BootstrapError, SymmetricMemoryError
from flashinfer_ar.memory import cuda_shared, fd_exchange
from flashinfer_ar.memory.fd_exchange import exchange_fds
from flashinfer_ar.memory.topology import DevicePlace, FabricPlace

TIMEOUT_S = 2.0  # of any wait for a peer; an exchange has half of it


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    with nothing_left(monkeypatch, TIMEOUT_S) as folder:
        yield folder


def test_a_rank_that_comes_late_is_waited_for():
    def late(comm, token, paths):
        time.sleep(0.3 * TIMEOUT_S if comm.Get_rank() == 2 else 0)

    def come_late(comm):
        time.sleep(0.75 * TIMEOUT_S if comm.Get_rank() == 2 else 0)
        return trade(Watched(comm, late))

    assert run_ranks(3, come_late) == traded(3)


def test_a_rank_that_comes_too_late_fails_everyone():
    def late(comm, token, paths):
        time.sleep(0.75 * TIMEOUT_S if comm.Get_rank() == 2 else 0)

    text, seconds = refused_on_all(3, lambda comm: refused(Watched(comm, late)))
    assert "exchange file descriptors failed on 2 of 3 ranks: rank 0 on host" in text
    assert text.count("after 1 s no descriptor came from ranks [2]") == 2
    assert seconds < TIMEOUT_S


def test_a_rank_that_reached_some_peers_only_fails_everyone(monkeypatch):
    real = fd_exchange._is_sent

    def stall(outbox, peer, *how):
        time.sleep(0.9 * TIMEOUT_S if (this_rank(), peer) == (2, 1) else 0)
        return real(outbox, peer, *how)

    monkeypatch.setattr(fd_exchange, "_is_sent", stall)
    text, seconds = refused_on_all(3, refused)
    assert "failed on 2 of 3 ranks: rank 1 on host" in text
    assert seconds < 1.5 * TIMEOUT_S


def test_a_full_inbox_keeps_no_other_rank_waiting(monkeypatch):
    real = fd_exchange._is_sent
    full = lambda outbox, peer, *how: peer != 1 and real(outbox, peer, *how)  # noqa: E731
    monkeypatch.setattr(fd_exchange, "_is_sent", full)
    text, seconds = refused_on_all(3, refused)
    assert "no descriptor came from ranks [], and none could be sent to ranks [1]" in text
    assert "no descriptor came from ranks [0, 2], and none could be sent to ranks []" in text
    assert seconds < TIMEOUT_S


STEPS = [("_inbox", "prepare an exchange of"), ("_swap", "exchange")]


@pytest.mark.parametrize(("function", "step"), STEPS)
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_is_everyone_s(function, step, failing, monkeypatch):
    real = getattr(fd_exchange, function)

    def fail(*arguments):
        result = real(*arguments)
        if this_rank() == failing:
            raise OSError(errno.EACCES, "not today")
        return result

    monkeypatch.setattr(fd_exchange, function, fail)
    text, seconds = refused_on_all(3, refused)
    assert f"{step} file descriptors failed on 1 of 3 ranks: rank {failing} on host" in text
    assert "PermissionError: [Errno 13] not today" in text
    assert seconds < 0.5 * TIMEOUT_S


def test_a_descriptor_that_is_none_fails_at_once():
    def give_nothing(comm):
        if comm.Get_rank() != 1:
            return refused(comm)
        with pytest.raises(SymmetricMemoryError) as caught:
            exchange_fds(comm, -1)
        return str(caught.value), 0.0

    text, seconds = refused_on_all(3, give_nothing)
    assert "rank 1 on host" in text
    assert "Bad file descriptor" in text
    assert seconds < 0.5 * TIMEOUT_S


def test_no_folder_for_inboxes(folder, monkeypatch):
    monkeypatch.setattr(fd_exchange, "_PARENT_FOLDER", str(folder / "missing"))
    text, _ = refused_on_all(2, refused)
    assert "prepare an exchange of file descriptors failed on 2 of 2 ranks" in text
    assert f"{folder}/missing" in text


def test_inboxes_that_cannot_be_reached_fail_at_once():
    def elsewhere(comm, token, paths):
        paths[:] = [path.replace("/fd", "/elsewhere") for path in paths]

    text, seconds = refused_on_all(3, lambda comm: refused(Watched(comm, elsewhere)))
    assert "failed on 3 of 3 ranks" in text
    assert "cannot send a descriptor to rank 1, /dev/shm/" in text
    assert "No such file or directory" in text
    assert seconds < 0.5 * TIMEOUT_S


def test_a_process_with_too_many_files_says_so(monkeypatch):
    real, all_have_sent = fd_exchange._received, threading.Barrier(2)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def receive_one_too_many(*how):
        all_have_sent.wait(5)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        return real(*how)

    monkeypatch.setattr(fd_exchange, "_received", receive_one_too_many)
    try:
        text, seconds = refused_on_all(2, refused)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "failed on 2 of 2 ranks" in text
    assert "could not be opened: this process has too many" in text
    assert seconds < 0.5 * TIMEOUT_S


def test_a_rank_that_leaves_is_an_error_in_time():
    def leave(comm, token, paths):
        if comm.Get_rank() == 1:
            raise SystemExit  # no Exception, so no vote

    def exchange(comm):
        started = time.monotonic()
        with pytest.raises((BootstrapError, SystemExit)):
            trade(Watched(comm, leave))
        return time.monotonic() - started

    assert max(run_ranks(3, exchange, timeout_s=0.2)) < TIMEOUT_S


def run_jobs(answer, rank, folder):
    """One rank of three processes: an exchange, then one in which rank 1 is killed."""
    import torch.distributed as dist

    fd_exchange._PARENT_FOLDER = folder
    os.environ["FLASHINFER_AR_TIMEOUT_S"] = f"{TIMEOUT_S}"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=3,
        timeout=timedelta(seconds=10),
    )
    comm = TorchDistBackend()
    before = open_fds()
    bytes_read = trade(comm)
    answer.send({"read": bytes_read, "no_fds_left": open_fds() == before})
    comm.barrier()

    def die(comm, token, paths):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    started = time.monotonic()
    with pytest.raises(BootstrapError):
        trade(Watched(comm, die))
    files = [name for _, name in open_fds() if "memfd" in name]
    answer.send({"files_left": files, "seconds": time.monotonic() - started})


def test_between_processes(folder):
    pipes = [PROCESSES.Pipe(duplex=False) for _ in range(3)]
    ranks = [
        PROCESSES.Process(target=run_jobs, args=(theirs, rank, str(folder)))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(ranks, pipes, strict=True):
        process.start()
        theirs.close()
    try:
        answers = [ours.recv() for ours, _ in pipes if ours.poll(20)]
        assert [answer["read"] for answer in answers] == traded(3)
        assert all(answer["no_fds_left"] for answer in answers)
        for survivor in (0, 2):
            assert pipes[survivor][0].poll(20)
            answer = pipes[survivor][0].recv()
            assert answer["files_left"] == []
            assert answer["seconds"] < 1.5 * TIMEOUT_S
    finally:
        for process, (ours, _) in zip(ranks, pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            ours.close()
    (folder / "rendezvous").unlink()
    # Of the killed rank one private folder stays, and nothing of the others.
    (left,) = folder.iterdir()
    assert stat.S_IMODE(left.stat().st_mode) == 0o700
    (left / "fd").unlink()
    left.rmdir()


FABRIC = FabricPlace("b5e4", 7)
ELSEWHERE = [{"hostname": "far"}, {"boot_id": "other"}, {"shm_device": 1 << 20}]


def allocate_in_places(monkeypatch, elsewhere, fabric):
    """Rank 2 is ``elsewhere``: the error text of all ranks, and the ways that they tried."""
    tried = set()

    def refuse(device, kind):
        tried.add(kind)
        return "CUDA_ERROR_NOT_SUPPORTED"

    def allocate(comm):
        rank = comm.Get_rank()
        host = host_identity()._replace(**(elsewhere if rank == 2 else {}))
        place = DevicePlace(host, f"0000:0{rank}:00.0", f"GPU-{rank}", fabric)
        device = cuda_shared.CudaDevice(None, rank, None, place)
        started = time.monotonic()
        with pytest.raises(SymmetricMemoryError) as caught:
            cuda_shared.CudaSharedMemory.allocate(comm, 4096, device)
        return str(caught.value), time.monotonic() - started

    monkeypatch.setattr(cuda_shared, "try_handle", refuse)
    text, seconds = refused_on_all(3, allocate)
    assert seconds < 0.5 * TIMEOUT_S
    return text, tried


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_ranks_of_different_hosts_are_refused_before_any_exchange(elsewhere, monkeypatch):
    text, tried = allocate_in_places(monkeypatch, elsewhere, None)
    assert "several hosts that no NVLink domain joins" in text
    assert f"rank 2: host {elsewhere.get('hostname', host_identity().hostname)}, device" in text
    assert tried == set()


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_hosts_of_one_fabric_do_not_try_descriptors(elsewhere, monkeypatch):
    text, tried = allocate_in_places(monkeypatch, elsewhere, FABRIC)
    assert "fabric handles: rank 0 on host" in text
    assert tried == {cuda_shared.HandleKind.FABRIC}


def test_one_host_tries_descriptors(monkeypatch):
    _, tried = allocate_in_places(monkeypatch, {}, FABRIC)
    assert tried == set(cuda_shared.HandleKind)
