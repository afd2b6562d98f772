"""Ranks that exchange file descriptors, and what must be true when a test is over."""

import contextlib
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from array import array
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest

from flashinfer_ar.bootstrap import CommBackend, run_ranks
from flashinfer_ar.errors import SymmetricMemoryError
from flashinfer_ar.memory import fd_exchange
from flashinfer_ar.memory.fd_exchange import exchange_fds

PROCESSES = multiprocessing.get_context("forkserver")


@contextlib.contextmanager
def nothing_left(monkeypatch, timeout_s):
    """A folder for inboxes, empty again at the end; no descriptor more is open then."""
    # The server imports torch once for all processes. It opens descriptors here: before the count.
    PROCESSES.set_forkserver_preload(["pytest", "flashinfer_ar.memory.fd_exchange"])
    resource_tracker.ensure_running()
    forkserver.ensure_running()
    monkeypatch.setenv("FLASHINFER_AR_TIMEOUT_S", f"{timeout_s}")
    with tempfile.TemporaryDirectory(prefix="far-test-", dir="/dev/shm") as folder:
        monkeypatch.setattr(fd_exchange, "_PARENT_FOLDER", folder)
        before = open_fds()
        yield Path(folder)
        assert set(open_fds()) <= set(before)
        assert os.listdir(folder) == []


class Watched(CommBackend):
    """Calls ``hook(comm, token, paths)`` when a rank knows all inboxes and has sent nothing yet."""

    def __init__(self, comm, hook):
        self._comm, self._hook = comm, hook
        self.Get_rank, self.Get_size = comm.Get_rank, comm.Get_size

    def allgather(self, obj):
        found = self._comm.allgather(obj)
        if isinstance(found[0], bytes):
            self._token = found[0]
        if isinstance(obj, str):
            self._hook(self._comm, self._token, found)
        return found


def open_fds() -> list[tuple[str, str]]:
    """Descriptors and what they are; without the one that reads this list."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sorted((each.name, str(each.readlink())) for each in links if each.is_symlink())


def this_rank() -> int:
    return int(threading.current_thread().name.removeprefix("rank "))


def trade(comm) -> list[int]:
    """Exchange a file of this rank's, write to all ranks' files, return what they wrote here."""
    rank, num_ranks = comm.Get_rank(), comm.Get_size()
    own = os.memfd_create(f"rank {rank}")
    fds = []
    try:
        fds = exchange_fds(comm, own)
        assert not any(os.get_inheritable(fd) for fd in fds)
        assert own not in fds
        for peer, fd in enumerate(fds):
            os.pwrite(fd, bytes([(num_ranks * rank + peer) % 256]), rank)
        comm.barrier()
        return list(os.pread(own, num_ranks, 0))
    finally:
        for fd in (own, *fds):
            os.close(fd)


def traded(num_ranks: int) -> list[list[int]]:
    """What :func:`trade` returns on each rank."""
    everyone = range(num_ranks)
    return [[(num_ranks * peer + rank) % 256 for peer in everyone] for rank in everyone]


def refused(comm) -> tuple[str, float]:
    """The error of an exchange that must fail, and how long it took."""
    started = time.monotonic()
    with pytest.raises(SymmetricMemoryError) as caught:
        trade(comm)
    return str(caught.value), time.monotonic() - started


def refused_on_all(num_ranks, exchange) -> tuple[str, float]:
    """The one error text of all ranks, and the longest time it took."""
    texts, seconds = zip(*run_ranks(num_ranks, exchange), strict=True)
    assert len(set(texts)) == 1, texts
    return texts[0], max(seconds)


def send(path: str, greeting: bytes, fds=()) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outbox:
        outbox.setblocking(False)
        outbox.sendmsg([greeting], ancillary, 0, path)


def in_process(function, *arguments):
    """What ``function(answer, *arguments)`` sends to ``answer`` from a process of its own."""
    ours, theirs = PROCESSES.Pipe()
    with ours, theirs:
        process = PROCESSES.Process(target=function, args=(theirs, *arguments))
        process.start()
        theirs.close()
        try:
            return ours.recv() if ours.poll(10) else None
        except EOFError:
            return None
        finally:
            process.kill()
            process.join()
            process.close()
