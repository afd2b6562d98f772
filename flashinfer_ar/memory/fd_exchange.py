"""Hands a file descriptor of every rank to every rank of one machine.

By SCM_RIGHTS over AF_UNIX sockets: ``pidfd_getfd`` needs ptrace rights, which containers lack. Each
rank has an inbox, a socket in a folder of its own with mode 0700 and a name that cannot be guessed,
and takes descriptors only from processes of its own user that know the exchange's token. Inboxes
take datagrams: a message comes whole or not at all, it stays if its sender dies, and there is no
connection that a stranger could open and keep silent.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import socket
import struct
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from flashinfer_ar import env
from flashinfer_ar.bootstrap import CommBackend, agreed_step
from flashinfer_ar.errors import BootstrapError

# All ranks of a host see one /dev/shm (HostIdentity). TMPDIR promises less: it may be a rank's own,
# too long for a socket's address, or on a file system that has no sockets.
_PARENT_FOLDER = "/dev/shm"
_GREETING = struct.Struct("!32sI")  # token of the exchange, rank of the sender
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_FD_BYTES = array("i").itemsize
# Room for a second descriptor: a message that has more than one must be seen to have them.
_ANCILLARY_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(2 * _FD_BYTES)
# A full inbox (of 10 messages on many systems), or as many descriptors under way between this
# user's processes as one of them may open. Both pass, since ranks that wait empty their inboxes.
_PASSING_ERRORS = (errno.EAGAIN, errno.ETOOMANYREFS)
_PAUSE_S = 0.002


class _Message(NamedTuple):
    greeting: bytes
    uid: int | None  # of the sender, from the kernel
    fds: Sequence[int]


def exchange_fds(comm: CommBackend, fd: int) -> list[int]:
    """Every rank's ``fd`` as a descriptor of this process, in rank order; collective.

    The caller owns and closes what it gets, the duplicate of its own ``fd`` included; all are
    close-on-exec. Raises ``SymmetricMemoryError`` on all ranks, and leaves no descriptor open, if a
    rank has no inbox or cannot reach a peer's, or if a peer's descriptor does not come within half
    of ``FLASHINFER_AR_TIMEOUT_S``. Raises ``BootstrapError`` if a rank is lost.
    """
    rank, num_ranks = comm.Get_rank(), comm.Get_size()
    token = comm.bcast(secrets.token_bytes(32) if rank == 0 else None, 0)
    fds: dict[int, int] = {}
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as sockets:
        undo.callback(lambda: _close_all(list(fds.values())))
        with agreed_step(comm, "prepare an exchange of file descriptors"):
            fds[rank] = os.dup(fd)
            inbox = sockets.enter_context(_inbox())
        paths = comm.allgather(inbox.getsockname())
        with agreed_step(comm, "exchange file descriptors"):
            _swap(inbox, paths, _GREETING.pack(token, rank), fds)
        undo.pop_all()
    return [fds[peer] for peer in range(num_ranks)]


@contextlib.contextmanager
def _inbox() -> Iterator[socket.socket]:
    folder = Path(tempfile.mkdtemp(prefix="flashinfer_ar-", dir=_PARENT_FOLDER))
    path = folder / "fd"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
            inbox.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            inbox.bind(str(path))
            yield inbox
    finally:
        # After the last vote no rank may fail alone. Not rmtree: it needs descriptors of its own.
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            folder.rmdir()


def _swap(inbox: socket.socket, paths: Sequence[str], greeting: bytes, fds: dict[int, int]) -> None:
    """Send this rank's descriptor, the only one in ``fds``, to all peers; add theirs."""
    ((rank, own_fd),) = fds.items()
    unsent = deque([*range(rank + 1, len(paths)), *range(rank)])
    missing = set(unsent)
    # Half: a peer that has everything waits in the vote for as long as any wait may take. It must
    # still be there when a rank gives up here.
    timeout_s = env.timeout_s() / 2
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outbox:
        outbox.setblocking(False)
        while unsent or missing:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise BootstrapError(
                    f"after {timeout_s:g} s no descriptor came from ranks {sorted(missing)}, "
                    f"and none could be sent to ranks {sorted(unsent)}"
                )
            if unsent and _is_sent(outbox, unsent[0], paths[unsent[0]], greeting, own_fd):
                unsent.popleft()
                continue
            unsent.rotate(-1)  # one that is slow shall not keep the others waiting
            message = _received(inbox, min(remaining_s, _PAUSE_S) if unsent else remaining_s)
            peer = _peer_of(message, greeting)
            if peer is None or peer not in missing:
                _close_all(message.fds)
                continue
            missing.remove(peer)
            (fds[peer],) = message.fds


def _is_sent(outbox: socket.socket, peer: int, path: str, greeting: bytes, fd: int) -> bool:
    """False where it is worth another try."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))]
    try:
        outbox.sendmsg([greeting], ancillary, 0, path)
    except OSError as error:
        if error.errno in _PASSING_ERRORS:
            return False
        raise BootstrapError(f"cannot send a descriptor to rank {peer}, {path}: {error}") from error
    return True


def _received(inbox: socket.socket, wait_s: float) -> _Message:
    """The next message, anybody's; an empty one if none comes in time."""
    inbox.settimeout(max(wait_s, 1e-3))  # 0 would mean non-blocking
    uid, fds = None, array("i")
    try:
        # Not socket.recv_fds: it drops its flags, and with them close-on-exec.
        greeting, ancillary, flags, _ = inbox.recvmsg(
            _GREETING.size + 1, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
        )
    except TimeoutError:
        return _Message(b"", None, ())
    for _, kind, data in ancillary:
        if kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) // _FD_BYTES * _FD_BYTES])
        elif kind == socket.SCM_CREDENTIALS:
            _, uid, _ = _CREDENTIALS.unpack(data)
    if flags & socket.MSG_CTRUNC and not fds:
        raise BootstrapError(
            "a descriptor came and could not be opened: this process has too many (ulimit -n), or "
            "a security module forbids it"
        )
    return _Message(greeting, uid, fds)


def _peer_of(message: _Message, own_greeting: bytes) -> int | None:
    """The rank of a sender that is one: this user's, knows the token, gives one descriptor."""
    if len(message.greeting) != _GREETING.size or message.uid != os.getuid():
        return None
    its_token, peer = _GREETING.unpack(message.greeting)
    own_token, _ = _GREETING.unpack(own_greeting)
    is_peer = hmac.compare_digest(its_token, own_token) and len(message.fds) == 1
    return peer if is_peer else None


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
