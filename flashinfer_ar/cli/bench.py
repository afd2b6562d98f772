"""``flashinfer-ar bench``: what a call takes on this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from flashinfer_ar import strategy_tables
from flashinfer_ar.bootstrap import CommBackend
from flashinfer_ar.cli.options import (
    ElementType,
    HiddenSize,
    Numbers,
    NumRounds,
    Tokens,
    failed,
    progress_bar,
    require_hidden_size,
    whole_number,
)
from flashinfer_ar.cli.ranks import launch_of, on_launched_ranks, on_virtual_ranks
from flashinfer_ar.jit import HOST_TARGET, DType, Epilogue, KernelKind
from flashinfer_ar.jit.spec import MAX_WORLD_SIZE
from flashinfer_ar.launch import target_of
from flashinfer_ar.strategy import one_shot_limits
from flashinfer_ar.timing import Rounds, percentiles, shapes_of, time_both

_TOKENS = Numbers((1, 4, 16, 32, 128))


@dataclasses.dataclass(frozen=True)
class Time:
    """Microseconds a call over the rounds: median, 5th and 95th percentile."""

    median: float
    p5: float
    p95: float

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Time:
        """The summary of at least two rounds."""
        return cls(*(round(each, 3) for each in percentiles(rounds)))

    def __str__(self) -> str:
        return f"{_shown(self.median)} ({_shown(self.p5)}-{_shown(self.p95)})"


@dataclasses.dataclass(frozen=True)
class Row:
    """One size of message."""

    num_tokens: int
    message_bytes: int
    one_shot_us: Time
    two_shot_us: Time
    auto: KernelKind

    @property
    def algorithm_gb_s(self) -> float:
        """Message bytes over the time of the kernel that ``AUTO`` chooses."""
        chosen = self.one_shot_us if self.auto is KernelKind.ONESHOT else self.two_shot_us
        return self.message_bytes / chosen.median / 1e3


@dataclasses.dataclass(frozen=True)
class Bench:
    """What one run of the command found."""

    device: str
    target: str
    world_size: int
    virtual: bool
    hidden_size: int
    dtype: str
    epilogue: str
    num_rounds: int
    strategy_table: str
    source: str  # of the limit that AUTO goes by
    rows: Sequence[Row]

    def notes(self) -> list[str]:
        """What the figures do not say."""
        notes = [
            f"KiB of one rank's message; us a call of the slowest rank, median (5th-95th "
            f"percentile) of {self.num_rounds} rounds; GB/s of messages with AUTO's choice",
            f"AUTO: {self.strategy_table} ({self.source})",
        ]
        if self.target == HOST_TARGET:
            notes.append("ranks share this machine's CPU: the figures mean nothing for GPUs")
        elif self.virtual:
            notes.append("virtual ranks share one GPU: what the kernels cost, without any NVLink")
        return notes

    def as_json(self) -> dict[str, Any]:
        """Everything, with the bandwidths."""
        rows = [
            dataclasses.asdict(row) | {"algorithm_gb_s": round(row.algorithm_gb_s, 6)}
            for row in self.rows
        ]
        return dataclasses.asdict(self) | {"rows": rows}


def bench(
    hidden: HiddenSize = 7168,
    tokens: Tokens = _TOKENS,
    dtype: ElementType = DType.BFLOAT16,
    fused: Annotated[
        bool,
        typer.Option("--fused/--plain", help="With residual add and RMSNorm, or the sum alone."),
    ] = True,
    virtual_ranks: Annotated[
        int | None,
        typer.Option(
            parser=whole_number(1, MAX_WORLD_SIZE),
            metavar="RANKS",
            help="Ranks that are threads and share one GPU, or the CPU where there is none.",
            show_default="2, unless mpirun, srun or torchrun started this command",
        ),
    ] = None,
    rounds: NumRounds = 21,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the figures there too.")
    ] = None,
) -> None:
    """Time allreduce, one-shot and two-shot, as an engine would call it: in CUDA graphs, with PDL.

    With a GPU for each rank:

        mpirun -np 8 flashinfer-ar bench --hidden 7168 --tokens 1,16,128

    On one GPU virtual ranks show what the kernels cost, not what the link costs.
    """
    require_hidden_size(hidden, dtype, fused, "--hidden")
    launched = launch_of(virtual_ranks, "--virtual-ranks")
    epilogue = Epilogue.ADD_RMS_NORM if fused else Epilogue.NONE
    shapes = shapes_of(tokens, hidden, dtype, epilogue)
    with progress_bar() as progress:
        task = progress.add_task("timing", total=len(shapes))

        def body(comm: CommBackend, device: torch.device) -> Bench:
            timed = time_both(comm, device, shapes, rounds, lambda: progress.advance(task))
            return _bench(device, comm.Get_size(), launched is None, timed)

        if launched is None:
            found = on_virtual_ranks(virtual_ranks or 2, body)
        else:
            found = on_launched_ranks(launched, body)
    if launched is None or launched.rank == 0:
        _print(found)
        if json is not None:
            _write(found, json)


def _write(found: Bench, path: Path) -> None:
    try:
        path.write_text(dumps(found.as_json(), indent=2) + "\n")
    except OSError as error:
        raise failed(f"--json: {error}") from None


def _bench(device: torch.device, world_size: int, virtual: bool, timed: Sequence[Rounds]) -> Bench:
    target, shape = target_of(device), timed[0].shape
    user_table = strategy_tables.path_in_use(target)
    entry = strategy_tables.table_in_use(target).entry(world_size, shape.epilogue)
    return Bench(
        device="CPU" if device.type == "cpu" else torch.cuda.get_device_name(device),
        target=target,
        world_size=world_size,
        virtual=virtual,
        hidden_size=shape.hidden_size,
        dtype=shape.dtype.value,
        epilogue=shape.epilogue.value,
        num_rounds=len(timed[0].one_shot_us),
        strategy_table="the shipped table" if user_table is None else str(user_table),
        source=entry.source.value,
        rows=[_row(target, world_size, each) for each in timed],
    )


def _row(target: str, world_size: int, timed: Rounds) -> Row:
    shape = timed.shape
    limits = one_shot_limits(target, world_size)
    return Row(
        num_tokens=shape.num_tokens,
        message_bytes=shape.message_bytes,
        one_shot_us=Time.of(timed.one_shot_us),
        two_shot_us=Time.of(timed.two_shot_us),
        auto=limits.resolve(shape.strategy, shape.epilogue, shape.message_bytes),
    )


def _print(found: Bench) -> None:
    kind = "virtual ranks" if found.virtual else "ranks"
    table = Table(
        title=f"{found.world_size} {kind}, {found.device}: hidden {found.hidden_size}, "
        f"{found.dtype}, {found.epilogue}",
        title_justify="left",
    )
    for heading in ("tokens", "KiB", "one-shot, us", "two-shot, us", "AUTO", "GB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(
            str(row.num_tokens),
            f"{row.message_bytes / 1024:.1f}",
            str(row.one_shot_us),
            str(row.two_shot_us),
            row.auto.value,
            _shown(row.algorithm_gb_s),
        )
    console = Console()
    console.print(table)
    for note in found.notes():
        console.print(note, highlight=False)


def _shown(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
