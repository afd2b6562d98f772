"""Hands a file descriptor of every rank to every rank of one machine.

By SCM_RIGHTS over AF_UNIX sockets: ``pidfd_getfd`` needs ptrace rights, which containers lack. Each
rank listens in a folder of its own with mode 0700 and a name that cannot be guessed, and takes
descriptors only from processes of its own user that know the exchange's token.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from flashinfer_ar import env
from flashinfer_ar.bootstrap import CommBackend, agreed_step
from flashinfer_ar.errors import BootstrapError

_MAX_SOCKET_PATH_BYTES = 107  # sun_path, without its final zero
_GREETING = struct.Struct("!32sI")  # token of the exchange, rank of the sender
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def exchange_fds(comm: CommBackend, fd: int) -> list[int]:
    """Every rank's ``fd`` as a descriptor of this process, in rank order; collective.

    The caller owns and closes what it gets, the duplicate of its own ``fd`` included; all are
    close-on-exec. Raises ``SymmetricMemoryError`` on all ranks, and leaves no descriptor open, if a
    rank cannot listen or if a peer's descriptor does not come within ``FLASHINFER_AR_TIMEOUT_S``.
    """
    deadline = time.monotonic() + env.timeout_s()
    rank, num_ranks = comm.Get_rank(), comm.Get_size()
    token = comm.bcast(secrets.token_bytes(32) if rank == 0 else None, 0)
    with contextlib.ExitStack() as sockets, contextlib.ExitStack() as undo:
        with agreed_step(comm, "listen for file descriptors"):
            listener = sockets.enter_context(_listener(num_ranks))
        paths = comm.allgather(listener.getsockname())
        with agreed_step(comm, "exchange file descriptors"):
            # A connection and what is sent on it wait in the listener's queue: nobody has to accept
            # before all have sent.
            for peer, path in enumerate(paths):
                if peer != rank:
                    sockets.enter_context(_sent(path, _GREETING.pack(token, rank), fd, deadline))
            fds = {rank: os.dup(fd)}
            undo.callback(_close_all, fds)
            while len(fds) < num_ranks:
                _receive(listener, token, fds, deadline)
        undo.pop_all()
    return [fds[peer] for peer in range(num_ranks)]


@contextlib.contextmanager
def _listener(backlog: int) -> Iterator[socket.socket]:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="far-", dir=_short_folder())
        )
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(Path(folder, "fd")))
        listener.listen(backlog)
        yield listener


def _short_folder() -> str:
    """The temporary folder, or ``/tmp`` where its name leaves no room for a socket's."""
    folder = tempfile.gettempdir()
    room = len(os.fsencode(folder)) + len("/far-xxxxxxxx/fd")
    return folder if room <= _MAX_SOCKET_PATH_BYTES else "/tmp"


@contextlib.contextmanager
def _sent(path: str, greeting: bytes, fd: int, deadline: float) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_remaining_s(deadline))
        connection.connect(path)
        socket.send_fds(connection, [greeting], [fd])
        yield


def _receive(listener: socket.socket, token: bytes, fds: dict[int, int], deadline: float) -> None:
    """Take the next connection; what is no peer's is closed and forgotten."""
    try:
        listener.settimeout(_remaining_s(deadline))
        connection, _ = listener.accept()
    except TimeoutError:
        raise BootstrapError(f"descriptors came from ranks {sorted(fds)} only") from None
    with connection:
        connection.settimeout(_remaining_s(deadline))
        if _uid_of(connection) != os.geteuid():
            return
        greeting, received, _, _ = socket.recv_fds(
            connection, _GREETING.size, maxfds=1, flags=socket.MSG_CMSG_CLOEXEC
        )
        peer = _peer_of(greeting, token)
        if peer is None or peer in fds or len(received) != 1:
            _close_all(dict(enumerate(received)))
            return
        fds[peer] = received[0]


def _peer_of(greeting: bytes, token: bytes) -> int | None:
    """The rank of a sender that knows the token."""
    if len(greeting) != _GREETING.size:
        return None
    its_token, peer = _GREETING.unpack(greeting)
    return peer if hmac.compare_digest(its_token, token) else None


def _uid_of(connection: socket.socket) -> int:
    size = _CREDENTIALS.size
    _, uid, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return int(uid)


def _remaining_s(deadline: float) -> float:
    """Never zero, which would mean non-blocking."""
    return max(deadline - time.monotonic(), 1e-3)


def _close_all(fds: Mapping[int, int]) -> None:
    for fd in fds.values():
        os.close(fd)
