"""``flashinfer-ar tune``: a strategy table from this machine's times."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from flashinfer_ar import env, strategy_tables
from flashinfer_ar.bootstrap import CommBackend
from flashinfer_ar.cli.options import (
    ElementType,
    HiddenSize,
    Numbers,
    NumRounds,
    Tokens,
    progress_bar,
    require_hidden_size,
    whole_numbers,
)
from flashinfer_ar.cli.ranks import launch_of, on_launched_ranks, on_virtual_ranks
from flashinfer_ar.jit import DType
from flashinfer_ar.jit.spec import MAX_WORLD_SIZE
from flashinfer_ar.launch import target_of
from flashinfer_ar.strategy_tables import UNLIMITED, Entry
from flashinfer_ar.tuning import Tuning
from flashinfer_ar.tuning import tune as tune_ranks

_TOKENS = Numbers((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256))


def tune(
    virtual_ranks: Annotated[
        Numbers | None,
        typer.Option(
            parser=whole_numbers(2, MAX_WORLD_SIZE),
            metavar="RANKS,...",
            help="World sizes to time on one GPU with ranks that are threads, or on the CPU where "
            "there is none. On a GPU the link between the ranks is then modelled.",
            show_default="none: a launcher starts a process for each GPU",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The table to write. One that is there keeps its other entries.",
            show_default="where AUTO looks for it, in ~/.config/flashinfer_ar",
        ),
    ] = None,
    hidden: HiddenSize = 7168,
    tokens: Tokens = _TOKENS,
    dtype: ElementType = DType.BFLOAT16,
    rounds: NumRounds = 15,
) -> None:
    """Time one-shot and two-shot over sizes, and write down up to which size `AUTO` goes one-shot.

    With a GPU for each rank, for that number of ranks:

        mpirun -np 8 flashinfer-ar tune

    On one GPU, with the link modelled (`flashinfer_ar/link_model.py` says how, and how far off):

        flashinfer-ar tune --virtual-ranks 2,4,8

    Workspaces read the table from `~/.config/flashinfer_ar/strategy_tables`, where it is written on
    every host of the ranks, or from the file that `FLASHINFER_AR_STRATEGY_TABLE` names.
    """
    require_hidden_size(hidden, dtype, fused=True, option="--hidden")
    launched = launch_of(virtual_ranks, "--virtual-ranks")
    if launched is None and virtual_ranks is None:
        meaning = "must be given, unless mpirun, srun or torchrun starts a process for each GPU"
        raise typer.BadParameter(meaning, param_hint="'--virtual-ranks'")
    out = out or _default_path()
    command = shlex.join(["flashinfer-ar", *sys.argv[1:]])
    tuning = Tuning(hidden, dtype, tokens, rounds, launched is None, command)
    world_sizes: Sequence[int] = virtual_ranks or (0,)
    with progress_bar() as progress:
        task = progress.add_task("timing", total=len(world_sizes) * tuning.num_shapes)

        def body(comm: CommBackend, device: torch.device) -> list[Entry]:
            return tune_ranks(comm, device, tuning, out, lambda: progress.advance(task))

        if launched is not None:
            entries = on_launched_ranks(launched, body)
        else:
            entries = [entry for each in world_sizes for entry in on_virtual_ranks(each, body)]
    if launched is None or launched.rank == 0:
        _print(entries, out)


def _default_path() -> Path:
    if env.strategy_table() is not None:
        meaning = "must be given while FLASHINFER_AR_STRATEGY_TABLE names the table in use"
        raise typer.BadParameter(meaning, param_hint="'--out'")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = strategy_tables.user_path(target_of(device))
    if path is None:
        raise typer.BadParameter("must be given: this user has no home", param_hint="'--out'")
    return path


def _print(entries: Sequence[Entry], path: Path) -> None:
    table = Table("ranks", "epilogue", "one-shot up to", "source")
    for entry in entries:
        limit = entry.one_shot_max_bytes
        shown = "any size" if limit == UNLIMITED else f"{limit} bytes"
        table.add_row(str(entry.world_size), entry.epilogue.value, shown, entry.source.value)
    Console().print(table)
    typer.echo(f"written to {path}")
