"""``flashinfer-ar doctor``: what this machine can do for allreduce, and why not.

Probes return :class:`Finding` and print nothing; the command renders them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from flashinfer_ar import env
from flashinfer_ar.doctor import ranks
from flashinfer_ar.doctor.finding import Entry, Finding, Report, Status
from flashinfer_ar.doctor.launchers import launch
from flashinfer_ar.doctor.process import examine
from flashinfer_ar.errors import BootstrapError

# Above all the limits of the probes together.
_PROBES_LIMIT_S = 60.0
_RANK_0_LIMIT_S = 5.0
_STDERR = 2


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`diagnose` found on this rank."""

    report: Report  # of all ranks, where they met
    rank: int
    lost: str | None  # why the ranks did not meet


def diagnose() -> Diagnosis:
    """Examine this process; under mpirun, srun or torchrun, collectively, all ranks.

    It ends: a peer that hangs is ``lost``; a driver or an MPI library that hangs ends the process
    with status 1 and a traceback that names the place.
    """
    launched = launch()
    with _deadline():
        own = examine(launched)
        if launched is None:
            return Diagnosis(ranks.report([own]), 0, None)
        try:
            report = ranks.report(ranks.gather(launched, own))
        except BootstrapError as error:
            return Diagnosis(ranks.alone(own, launched, error), launched.rank, str(error))
        return Diagnosis(report, launched.rank, None)


def end_without_peers(rank: int) -> None:
    """End with status 1: an ordinary exit would wait in ``MPI_Finalize`` for lost peers."""
    if rank != 0:  # a launcher stops all ranks when one ends so: let rank 0 print first
        time.sleep(_RANK_0_LIMIT_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    # faulthandler's thread needs no interpreter lock, which a hanging driver call may hold.
    try:
        timeout_s = env.timeout_s()
    except ValueError:
        timeout_s = _PROBES_LIMIT_S
    limit_s = _PROBES_LIMIT_S + timeout_s
    faulthandler.dump_traceback_later(limit_s, exit=True, file=_STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


__all__ = ["Diagnosis", "Entry", "Finding", "Report", "Status", "diagnose", "end_without_peers"]
