"""``flashinfer-ar doctor``: what this machine can do."""

from __future__ import annotations

from json import dumps
from typing import Annotated

import typer
from rich.console import Console

from flashinfer_ar.doctor import Report, Status, diagnose, end_without_peers
from flashinfer_ar.doctor.render import show


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print the report for machines.")] = False,
) -> None:
    """Say what this machine can do for allreduce, what it cannot, why not, and what to do.

    Started by mpirun, srun or torchrun it compares the ranks, and rank 0 prints one report:

        mpirun -np 8 flashinfer-ar doctor

    A failure keeps allreduce from running on this machine's GPUs or, where it has none, on its CPU.
    Exit status: 0 without a failure, 1 with one.
    """
    diagnosis = diagnose()
    if diagnosis.rank == 0:
        _print_report(diagnosis.report, json)
        exit_code = int(diagnosis.report.status is Status.FAILURE)
    else:
        # One status is enough, and a launcher stops a rank that is still printing for another's.
        exit_code = 0
    if diagnosis.lost is not None:
        typer.echo(f"rank {diagnosis.rank}: {diagnosis.lost}", err=True)
        end_without_peers(diagnosis.rank)
    raise typer.Exit(exit_code)


def _print_report(report: Report, as_json: bool) -> None:
    if as_json:
        typer.echo(dumps(report.as_json(), indent=2))
    else:
        show(report, Console())
