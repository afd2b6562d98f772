"""``flashinfer-ar build``: kernels ahead of time."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from flashinfer_ar import jit
from flashinfer_ar.cli.options import failed, progress_bar, require_hidden_size, whole_number
from flashinfer_ar.errors import JitError
from flashinfer_ar.instances import Instances
from flashinfer_ar.jit import HOST_TARGET, DType, KernelSpec
from flashinfer_ar.jit.nvrtc import requested_targets, target_of_arch
from flashinfer_ar.jit.roots import home_root
from flashinfer_ar.jit.spec import MAX_WORLD_SIZE


def _target(text: str) -> str:
    if text == HOST_TARGET:
        return HOST_TARGET
    try:
        return target_of_arch(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}, {HOST_TARGET}") from None


def build(
    world_size: Annotated[
        list[int],
        typer.Option(
            parser=whole_number(1, MAX_WORLD_SIZE),
            metavar="RANKS",
            help=f"Ranks of the tensor-parallel group, 1 to {MAX_WORLD_SIZE}. Repeatable.",
        ),
    ],
    hidden_size: Annotated[
        list[int] | None,
        typer.Option(
            parser=whole_number(1),
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
            parser=whole_number(0),
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
            parser=whole_number(1),
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
        num_built = _build_all(specs, root, workers)
    except JitError as error:
        raise failed(str(error)) from None
    typer.echo(
        f"{len(specs)} kernels: {num_built} compiled, {len(specs) - num_built} already there; "
        f"{time.monotonic() - started:.1f} s; in {root}"
    )


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
        require_hidden_size(size, dtype, fused=True, option="--hidden-size")


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
        raise failed(f"FLASHINFER_AR_CACHE_DIR: {error}") from None


def _build_all(specs: Sequence[KernelSpec], root: Path, workers: int | None) -> int:
    """Build into the cache folder ``root``; how many of ``specs`` were not there before."""
    known = {entry.name for entry in root.iterdir()}
    num_built = 0
    # Closed, so that after an error no other kernel is begun.
    with progress_bar() as progress, contextlib.closing(jit.build_each(specs, workers)) as paths:
        for path in progress.track(paths, total=len(specs), description="compiling"):
            entry = path.parent
            if entry.parent != root:  # the cache has warned and said why
                raise JitError(f"FLASHINFER_AR_CACHE_DIR: {root} takes no kernels")
            num_built += entry.name not in known
    return num_built
