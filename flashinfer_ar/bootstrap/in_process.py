"""Ranks that are threads of one process: for tests, and for several ranks on one GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from flashinfer_ar import env
from flashinfer_ar.bootstrap.comm import CommBackend, split_members
from flashinfer_ar.errors import BootstrapError

Result = TypeVar("Result")


class _Run:
    """What all the groups of one run share: one lock, and the failure that ends every wait."""

    def __init__(self, timeout_s: float | None) -> None:
        self.changed = threading.Condition()
        self.failure: str | None = None
        self.timeout_s = env.timeout_s() if timeout_s is None else timeout_s

    def abort(self, failure: str) -> None:
        with self.changed:
            self.failure = self.failure or failure
            self.changed.notify_all()


class _Group:
    """The meeting place of the ranks of one group."""

    def __init__(self, run: _Run, size: int) -> None:
        self.run = run
        self.size = size
        self._round: dict[int, Any] = {}

    def exchange(self, rank: int, value: Any) -> list[Any]:
        with self.run.changed:
            if self.run.failure is not None:
                raise BootstrapError(self.run.failure)
            values = self._round
            values[rank] = value
            if len(values) == self.size:
                self._round = {}
                self.run.changed.notify_all()
            self._await_all(rank, values)
            return [values[peer] for peer in range(self.size)]

    def _await_all(self, rank: int, values: dict[int, Any]) -> None:
        def complete() -> bool:
            return len(values) == self.size

        self.run.changed.wait_for(
            lambda: complete() or self.run.failure is not None, self.run.timeout_s
        )
        if complete():
            return
        missing = sorted(set(range(self.size)) - set(values))
        self.run.abort(
            f"in-process allgather: rank {rank} of {self.size} waited {self.run.timeout_s:g} s "
            f"for ranks {missing}"
        )
        raise BootstrapError(self.run.failure)


class InProcessBackend(CommBackend):
    """One rank of a group of threads; :func:`in_process_ranks` and :func:`run_ranks` make them.

    Objects are handed over by reference, not copied. A collective waits for
    ``FLASHINFER_AR_TIMEOUT_S`` at most, or for the ``timeout_s`` of the run.
    """

    def __init__(self, group: _Group, rank: int) -> None:
        self._group = group
        self._rank = rank

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._group.size

    def allgather(self, obj: Any) -> list[Any]:
        return self._group.exchange(self._rank, obj)

    def Split(self, color: int, key: int) -> InProcessBackend:
        members = split_members(self.allgather((color, key)), color)
        place = members.index(self._rank)
        made = self.allgather(_Group(self._group.run, len(members)) if place == 0 else None)
        return InProcessBackend(made[members[0]], place)


def in_process_ranks(
    world_size: int, *, timeout_s: float | None = None
) -> tuple[InProcessBackend, ...]:
    """The ``world_size`` ranks of a new group; each is for one thread."""
    return _ranks(world_size, _Run(timeout_s))


def run_ranks(
    world_size: int,
    fn: Callable[[InProcessBackend], Result],
    *,
    timeout_s: float | None = None,
) -> list[Result]:
    """Run ``fn(comm)`` in ``world_size`` threads, one a rank; the results in rank order.

    When a rank raises, its peers' collectives raise ``BootstrapError`` at once, and the first
    exception is raised here after all threads ended, or after ``timeout_s`` for those that do not.
    ``timeout_s`` bounds each wait for a peer (default ``FLASHINFER_AR_TIMEOUT_S``), not ``fn``.
    """
    run = _Run(timeout_s)
    results: dict[int, Result] = {}
    failures: list[BaseException] = []

    def run_rank(comm: InProcessBackend) -> None:
        try:
            results[comm.Get_rank()] = fn(comm)
        except BaseException as error:  # also pytest's outcomes, which are no Exception
            failures.append(error)
            run.abort(f"rank {comm.Get_rank()} failed: {type(error).__name__}: {error}")
        else:
            with run.changed:
                run.changed.notify_all()

    threads = [
        threading.Thread(target=run_rank, args=(comm,), name=f"rank {rank}", daemon=True)
        for rank, comm in enumerate(_ranks(world_size, run))
    ]
    for thread in threads:
        thread.start()
    try:
        with run.changed:
            run.changed.wait_for(lambda: bool(failures) or len(results) == world_size)
    except BaseException:  # KeyboardInterrupt: let the threads end too
        run.abort("the run was interrupted")
        raise
    _join(threads, run.timeout_s)
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(world_size)]


def _ranks(world_size: int, run: _Run) -> tuple[InProcessBackend, ...]:
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: allowed is a whole number from 1")
    group = _Group(run, world_size)
    return tuple(InProcessBackend(group, rank) for rank in range(world_size))


def _join(threads: list[threading.Thread], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
