"""File descriptors between ranks: who gets what, strangers, full queues; nothing stays open."""

import errno
import os
import resource
import secrets
import select
import socket
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest
from fd_tools import Watched, in_process, nothing_left, send, trade, traded

from flashinfer_ar.bootstrap import run_ranks
from flashinfer_ar.memory import fd_exchange

PARENT_FOLDER = fd_exchange._PARENT_FOLDER
NOBODY = 65534


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    with nothing_left(monkeypatch, timeout_s=30) as folder:
        yield folder


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 16])
def test_every_rank_gets_every_file(num_ranks):
    assert run_ranks(num_ranks, trade) == traded(num_ranks)


def test_a_rack_of_ranks():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 72 * (72 + 4)  # all ranks' descriptors are this process's
    if limits[0] < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed + 256, limits[1]))
    try:
        assert run_ranks(72, trade) == traded(72)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_two_groups_at_once():
    def trade_twice(comm):
        half = comm.Split(comm.Get_rank() % 2, 0)
        return [trade(half) for _ in range(20)]

    found = run_ranks(6, trade_twice)
    assert found == [[traded(3)[rank // 2]] * 20 for rank in range(6)]


def test_ranks_in_two_groups():
    def trade_in_both(comm):
        whole, pair = comm.Split(0, 0), comm.Split(comm.Get_rank() // 2, 0)
        return [trade(group) for group in (whole, pair, whole)]

    for rank, found in enumerate(run_ranks(4, trade_in_both)):
        assert found == [traded(4)[rank], traded(2)[rank % 2], traded(4)[rank]]


def long_folder(tmp_path):
    name = tmp_path / ("x" * (150 - len(str(tmp_path)) - 1))
    name.mkdir()
    return name


TEMPORARY_FOLDERS = {
    "150 characters": long_folder,
    "missing": lambda tmp_path: tmp_path / "missing",
    "read-only, without sockets": lambda tmp_path: "/proc/self",
}


@pytest.mark.parametrize("which", TEMPORARY_FOLDERS)
def test_tmpdir_does_not_matter(which, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(fd_exchange, "_PARENT_FOLDER", PARENT_FOLDER)
    monkeypatch.setattr(tempfile, "tempdir", None)  # what it found out before
    monkeypatch.setenv("TMPDIR", str(TEMPORARY_FOLDERS[which](tmp_path)))
    hook = lambda comm, token, paths: seen.extend(paths)  # noqa: E731
    assert run_ranks(2, lambda comm: trade(Watched(comm, hook))) == traded(2)
    assert {str(Path(path).parents[1]) for path in seen} == {"/dev/shm"}
    assert not any(Path(path).parent.exists() for path in seen)


def test_a_stale_socket_file_is_left_alone(folder, monkeypatch):
    stale = folder / "flashinfer_ar-stale"
    stale.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as of_a_dead_rank:
        of_a_dead_rank.bind(str(stale / "fd"))
    names = lambda: iter(["stale", secrets.token_hex(4)])  # noqa: E731
    monkeypatch.setattr(tempfile, "_get_candidate_names", names)
    assert run_ranks(3, trade) == traded(3)
    (stale / "fd").unlink()
    stale.rmdir()


def test_inboxes_are_private_and_their_names_random(monkeypatch):
    folders, modes = [], set()

    def look(comm, token, paths):
        folders.extend(Path(path).parent for path in paths if comm.Get_rank() == 0)
        modes.update(stat.S_IMODE(Path(path).parent.stat().st_mode) for path in paths)
        comm.barrier()

    umask = os.umask(0)
    try:
        for _ in range(2):
            run_ranks(3, lambda comm: trade(Watched(comm, look)))
    finally:
        os.umask(umask)
    assert modes == {0o700}
    assert len({each.name.removeprefix("flashinfer_ar-") for each in folders}) == 6
    assert all(len(each.name) >= len("flashinfer_ar-12345678") for each in folders)


GREETING = fd_exchange._GREETING.pack
STRANGERS = {
    "wrong token": lambda token: (GREETING(bytes(32), 1), 1),
    "no descriptor": lambda token: (GREETING(token, 1), 0),
    "two descriptors": lambda token: (GREETING(token, 1), 2),
    "twenty descriptors": lambda token: (GREETING(token, 1), 20),
    "rank of the receiver": lambda token: (GREETING(token, 0), 1),
    "rank outside of the group": lambda token: (GREETING(token, 3), 1),
    "shorter": lambda token: (GREETING(token, 1)[:-1], 1),
    "longer": lambda token: (GREETING(token, 1) + b"x", 1),
    "empty": lambda token: (b"", 1),
}


@pytest.mark.parametrize("which", STRANGERS)
def test_a_stranger_is_ignored_and_its_descriptors_closed(which):
    reader, writer = os.pipe()

    def intrude(comm, token, paths):
        if comm.Get_rank() == 0:
            greeting, num_fds = STRANGERS[which](token)
            for _ in range(3):
                send(paths[0], greeting, [writer] * num_fds)
            os.close(writer)
        comm.barrier()

    try:
        assert run_ranks(3, lambda comm: trade(Watched(comm, intrude))) == traded(3)
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        assert poll.poll(0) == [(reader, select.POLLHUP)]  # nobody has the other end
    finally:
        os.close(reader)


def test_a_second_message_of_a_peer_is_ignored(monkeypatch):
    real = fd_exchange._is_sent
    monkeypatch.setattr(fd_exchange, "_is_sent", lambda *how: real(*how) and real(*how))
    assert run_ranks(3, trade) == traded(3)


def send_as_nobody(answer, path, token):
    os.setuid(NOBODY)
    with Path(os.devnull).open() as file:
        try:
            send(path, GREETING(token, 1), [file.fileno()])
        except OSError as error:
            answer.send(error.errno)
        else:
            answer.send(0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("folder_is_open", [False, True])
def test_another_user_stays_outside(folder, folder_is_open):
    folder.chmod(0o755)
    errors = []

    def intrude(comm, token, paths):
        if comm.Get_rank() == 0:
            if folder_is_open:
                Path(paths[0]).parent.chmod(0o755)
                Path(paths[0]).chmod(0o777)
            errors.append(in_process(send_as_nobody, paths[0], token))
        comm.barrier()

    assert run_ranks(2, lambda comm: trade(Watched(comm, intrude))) == traded(2)
    assert errors == [0 if folder_is_open else errno.EACCES]


def test_full_inboxes_are_waited_for():
    def fill(comm, token, paths):
        with pytest.raises(BlockingIOError):
            for _ in range(10_000):
                send(paths[comm.Get_rank()], b"junk")
        comm.barrier()

    assert run_ranks(4, lambda comm: trade(Watched(comm, fill))) == traded(4)


def trade_in_a_crowd(answer):
    """Exchange while more descriptors are under way than the kernel allows this user."""
    if os.getuid() == 0:
        os.setuid(1_000_000 + os.getpid())  # nobody else's descriptors are counted with ours
    os.environ["FLASHINFER_AR_TIMEOUT_S"] = "10"
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    crowd = socket.socketpair()
    with pytest.raises(OSError, match="Too many references"):
        for _ in range(100):
            socket.send_fds(crowd[0], [b"x"], [0, 1, 2])
    # The descriptors go with the last reader of the pair.
    threading.Timer(0.3, lambda: [each.close() for each in crowd]).start()
    started = time.monotonic()
    found = run_ranks(2, trade)
    answer.send((found, time.monotonic() - started))


def test_too_many_descriptors_under_way_pass():
    found, seconds = in_process(trade_in_a_crowd)
    assert found == traded(2)
    assert seconds >= 0.2
