"""Votes: a step that fails on one rank fails on all of them, with one text."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from flashinfer_ar.bootstrap.comm import CommBackend
from flashinfer_ar.errors import BootstrapError, FlashInferARError, SymmetricMemoryError

_NUM_SHOWN = 4


class _Vote(NamedTuple):
    step: str
    host: str
    error: str | None


class HostIdentity(NamedTuple):
    """Equal on two ranks that run one kernel and see one ``/dev/shm``, as far as can be told."""

    hostname: str
    boot_id: str
    shm_device: int


def host_identity() -> HostIdentity:
    """The identity of this machine; ``OSError`` where it cannot be read."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return HostIdentity(socket.gethostname(), boot_id, Path("/dev/shm").stat().st_dev)


def agree(comm: CommBackend, step: str, error: BaseException | None = None) -> None:
    """Return on every rank if no rank has an ``error``; else raise on every rank.

    Collective; called before every step in which ranks depend on what their peers did in ``step``.
    Raises ``SymmetricMemoryError`` with the same text on all ranks: the step, and rank, host and
    error of those that failed. It is chained from this rank's own error.
    Raises ``BootstrapError`` if the vote itself fails.
    """
    own = None if error is None else f"{type(error).__name__}: {error}"
    try:
        votes = comm.allgather(_Vote(step, socket.gethostname(), own))
    except BootstrapError as lost:
        raise BootstrapError(f"{step}: {lost}") from (error or lost)
    problem = _disagreement("the step", [vote.step for vote in votes]) or _failures(step, votes)
    if problem is not None:
        raise SymmetricMemoryError(problem) from error


@contextlib.contextmanager
def agreed_step(comm: CommBackend, step: str) -> Iterator[None]:
    """Run the body, then :func:`agree` on whether it worked; collective.

    The body does this rank's own work and no collective, since a rank that fails skips the rest.
    """
    try:
        yield
    except Exception as error:
        agree(comm, step, error)
    else:
        agree(comm, step)


def agree_on_value(
    comm: CommBackend,
    name: str,
    value: object,
    error_type: type[FlashInferARError] = SymmetricMemoryError,
) -> None:
    """Raise ``error_type`` on every rank unless all ranks gave an equal ``value``; collective."""
    problem = _disagreement(name, comm.allgather(value))
    if problem is not None:
        raise error_type(problem)


def _failures(step: str, votes: Sequence[_Vote]) -> str | None:
    failed = [
        f"rank {rank} on host {vote.host}: {vote.error}"
        for rank, vote in enumerate(votes)
        if vote.error is not None
    ]
    if not failed:
        return None
    return f"{step} failed on {len(failed)} of {len(votes)} ranks: {_listed(failed)}"


def _disagreement(name: str, values: Sequence[object]) -> str | None:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(repr(value), []).append(rank)
    if len(ranks) == 1:
        return None
    return f"ranks disagree on {name}: " + _listed(
        [f"{value} on ranks {_listed(which)}" for value, which in ranks.items()]
    )


def _listed(items: Sequence[object]) -> str:
    shown = [str(item) for item in items[:_NUM_SHOWN]]
    num_more = len(items) - len(shown)
    return "; ".join(shown) + (f"; and {num_more} more" if num_more else "")
