"""The ``flashinfer-ar`` command."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flashinfer_ar import jit, plan
from flashinfer_ar.doctor import Report, Status, diagnose, end_without_peers
from flashinfer_ar.doctor.render import show
from flashinfer_ar.errors import JitError
from flashinfer_ar.instances import Instances
from flashinfer_ar.jit import HOST_TARGET, DType, KernelSpec
from flashinfer_ar.jit.nvrtc import requested_targets, target_of_arch
from flashinfer_ar.jit.roots import home_root
from flashinfer_ar.jit.spec import MAX_WORLD_SIZE

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode="markdown")


@app.callback()
def main() -> None:
    """Allreduce kernels for GPUs joined by NVLink.

    Kernels are compiled when they are first needed; `flashinfer-ar build` does it ahead of time.
    """


def _whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """A parser of options; typer's own messages leave out the value that came."""

    def parse(text: str) -> int:
        if text.isdecimal() and int(text) >= least and (most is None or int(text) <= most):
            return int(text)
        allowed = f"a whole number from {least}" + ("" if most is None else f" to {most}")
        raise typer.BadParameter(f"{text!r}; allowed is {allowed}")

    return parse


def _target(text: str) -> str:
    if text == HOST_TARGET:
        return HOST_TARGET
    try:
        return target_of_arch(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}, {HOST_TARGET}") from None


@app.command()
def build(
    world_size: Annotated[
        list[int],
        typer.Option(
            parser=_whole_number(1, MAX_WORLD_SIZE),
            metavar="RANKS",
            help=f"Ranks of the tensor-parallel group, 1 to {MAX_WORLD_SIZE}. Repeatable.",
        ),
    ],
    hidden_size: Annotated[
        list[int] | None,
        typer.Option(
            parser=_whole_number(1),
            metavar="ELEMENTS",
            help="Hidden size of a model, which then has kernels of its own for RMSNorm. For GPUs "
            "generic ones, which take any size and more time, are always built. Repeatable.",
            show_default="none",
        ),
    ] = None,
    dtype: Annotated[
        list[DType] | None,
        typer.Option(
            metavar="DTYPE",
            help="float32, float16 or bfloat16: the dtype of that model. Repeatable.",
            show_default="all three",
        ),
    ] = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(
            parser=_target,
            metavar="ARCH",
            help="9.0a (H100, H200), 10.0a (B200, GB200), 10.3a (B300, GB300), or host for the "
            "CPU build. Repeatable.",
            show_default="those in FLASHINFER_AR_CUDA_ARCHS, else all but host",
        ),
    ] = None,
    rank: Annotated[
        list[int] | None,
        typer.Option(
            parser=_whole_number(0),
            metavar="RANK",
            help="Build for this rank alone; on GPUs each has kernels of its own. Repeatable.",
            show_default="all ranks",
        ),
    ] = None,
    multicast: Annotated[
        bool,
        typer.Option(
            "--multicast",
            help="Build the kernels that store through NVLink multicast instead of to each rank.",
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            parser=_whole_number(1),
            metavar="N",
            help="Compilers at a time.",
            show_default="one a CPU core",
        ),
    ] = None,
) -> None:
    """Compile kernels ahead of time, so that no rank compiles when it starts.

    Builds all that a workspace loads when it is made, into the cache that workspaces read
    (`FLASHINFER_AR_CACHE_DIR`, by default `~/.cache/flashinfer_ar`). Needs no GPU. Run it in the
    Python environment that will serve: kernels of another compiler version are not used.

    For a model of hidden size 7168 in bfloat16 on eight H200:

        flashinfer-ar build --world-size 8 --hidden-size 7168 --dtype bfloat16 --arch 9.0a
    """
    dtypes, hidden_sizes, ranks = dtype or list(DType), hidden_size or [], rank or []
    _check_ranks(ranks, min(world_size))
    _check_hidden_sizes(hidden_sizes, dtypes)
    targets = arch or _requested_targets()
    if multicast and HOST_TARGET in targets:
        raise typer.BadParameter("allowed for GPUs only, not for host", param_hint="'--multicast'")
    specs = _specs(targets, world_size, ranks, dtypes, hidden_sizes, multicast)
    started = time.monotonic()
    root = _cache_folder()
    try:
        num_built = _build_all(specs, root, workers or len(os.sched_getaffinity(0)))
    except JitError as error:
        raise _failed(str(error)) from None
    typer.echo(
        f"{len(specs)} kernels: {num_built} compiled, {len(specs) - num_built} already there; "
        f"{time.monotonic() - started:.1f} s; in {root}"
    )


@app.command()
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


# ---- From options to kernels --------------------------------------------------------------------


def _requested_targets() -> Sequence[str]:
    try:
        return requested_targets()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="FLASHINFER_AR_CUDA_ARCHS") from None


def _check_ranks(ranks: Sequence[int], world_size: int) -> None:
    for rank in ranks:
        if rank >= world_size:
            allowed = f"allowed with --world-size {world_size} is 0 to {world_size - 1}"
            raise typer.BadParameter(f"{rank}; {allowed}", param_hint="'--rank'")


def _check_hidden_sizes(hidden_sizes: Sequence[int], dtypes: Sequence[DType]) -> None:
    for size, dtype in itertools.product(hidden_sizes, dtypes):
        most = plan.max_hidden_size(dtype)
        if size % dtype.per_pack or size > most:
            allowed = f"allowed with {dtype.value} is a multiple of {dtype.per_pack} up to {most}"
            raise typer.BadParameter(f"{size}; {allowed}", param_hint="'--hidden-size'")


def _specs(
    targets: Sequence[str],
    world_sizes: Sequence[int],
    ranks: Sequence[int],
    dtypes: Sequence[DType],
    hidden_sizes: Sequence[int],
    multicast: bool,
) -> list[KernelSpec]:
    """What the workspaces of these configurations load, each kernel once."""
    own_sizes: Sequence[int | None] = hidden_sizes or [None]
    workspaces = (
        Instances(target, world_size, rank, hidden_size, dtype, multicast)
        for target, world_size in itertools.product(targets, world_sizes)
        for rank in _ranks(target, world_size, ranks)
        for hidden_size, dtype in itertools.product(own_sizes, dtypes)
    )
    return list(dict.fromkeys(itertools.chain.from_iterable(each.ahead() for each in workspaces)))


def _ranks(target: str, world_size: int, ranks: Sequence[int]) -> Sequence[int | None]:
    if target == HOST_TARGET:  # one kernel serves all ranks
        return [None]
    return ranks or range(world_size)


# ---- From kernels to the cache ------------------------------------------------------------------


def _cache_folder() -> Path:
    try:
        return home_root()
    except OSError as error:
        raise _failed(f"FLASHINFER_AR_CACHE_DIR: {error}") from None


def _build_all(specs: Sequence[KernelSpec], root: Path, workers: int) -> int:
    """Build into the cache folder ``root``; how many of ``specs`` were not there before."""
    known = {entry.name for entry in root.iterdir()}
    num_built = 0
    # Threads are enough: NVRTC runs without the GIL, and g++ in a process of its own.
    with _progress() as progress, ThreadPoolExecutor(workers) as pool:
        builds = [pool.submit(jit.build, spec) for spec in specs]
        try:
            for one in progress.track(builds, description="compiling"):
                entry = one.result().parent
                if entry.parent != root:  # the cache has warned and said why
                    raise JitError(f"FLASHINFER_AR_CACHE_DIR: {root} takes no kernels")
                num_built += entry.name not in known
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return num_built


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def _failed(message: str) -> typer.Exit:
    typer.echo(f"Error: {message}", err=True)
    return typer.Exit(1)
