"""Symmetric memory between the processes of one machine: one ``/dev/shm`` file a rank."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from flashinfer_ar.bootstrap import CommBackend, agree_on_value, agreed_step, host_identity
from flashinfer_ar.errors import SymmetricMemoryError
from flashinfer_ar.memory.mapped import MappedMemory, require_positive_size


class HostSharedMemory(MappedMemory):
    """Host memory that every rank of one machine maps; nothing outlives the processes."""

    @classmethod
    def allocate(cls, comm: CommBackend, size_bytes: int) -> HostSharedMemory:
        """``size_bytes`` on every rank, page-aligned and zero; collective.

        Raises ``SymmetricMemoryError`` on all ranks, and leaves nothing behind, if the ranks are on
        different machines, disagree on the size, or if one of them fails (a full ``/dev/shm``,
        another user's process). ``ValueError`` for a size below 1.
        """
        agree_on_value(comm, "size_bytes", size_bytes)
        require_positive_size(size_bytes)
        _require_one_host(comm)
        rank = comm.Get_rank()
        paths = comm.allgather(f"/dev/shm/flashinfer_ar-{secrets.token_hex(16)}")
        with contextlib.ExitStack() as undo:
            undo.callback(_unlink, paths)
            with agreed_step(comm, "create host shared memory"):
                _create(paths[rank], size_bytes)
            blocks = []
            with agreed_step(comm, "map host shared memory"):
                for path in paths:
                    blocks.append(undo.enter_context(contextlib.closing(_map(path, size_bytes))))
            # From here the mappings alone keep the pages: a crash leaves no file behind.
            _unlink(paths)
            undo.pop_all()
        return cls(rank, blocks)


def _require_one_host(comm: CommBackend) -> None:
    with agreed_step(comm, "identify the host"):
        own = host_identity()
    hosts = comm.allgather(own)
    if len(set(hosts)) == 1:
        return
    seen = "; ".join(
        f"rank {rank} on {host.hostname} (boot {host.boot_id[:8]}, /dev/shm {host.shm_device})"
        for rank, host in enumerate(hosts)
    )
    raise SymmetricMemoryError(
        f"host shared memory is for ranks of one machine that see one /dev/shm: {seen}"
    )


def _create(path: str, size_bytes: int) -> None:
    # 0600 and a name that cannot be guessed: only this user's ranks get in.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Reserves the pages. A file that is only made longer is SIGBUS later, when tmpfs is full.
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        message = f"/dev/shm has no room for {size_bytes} bytes (in a container: --shm-size)"
        raise OSError(errno.ENOSPC, message) from error
    finally:
        os.close(fd)


def _map(path: str, size_bytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return mmap.mmap(fd, size_bytes)
    finally:
        os.close(fd)


def _unlink(paths: Sequence[str]) -> None:
    # Every rank removes every name, so those of a rank that died go too; most are gone already.
    for path in paths:
        with contextlib.suppress(OSError):
            Path(path).unlink()
