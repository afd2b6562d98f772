"""What the commands share: parsers of options, the progress bar, the end after an error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flashinfer_ar import plan
from flashinfer_ar.jit import DType


class Numbers(tuple[int, ...]):
    """Whole numbers that an option takes as one text, such as ``1,4,16``."""

    def __str__(self) -> str:
        return ",".join(map(str, self))


# typer's own messages leave out the value that came; its parsers get defaults too, as they are.


def whole_number(least: int, most: int | None = None) -> Callable[[object], int]:
    """A parser of options."""

    def parse(given: object) -> int:
        text = str(given)
        if text.isdecimal() and int(text) >= least and (most is None or int(text) <= most):
            return int(text)
        allowed = f"a whole number from {least}" + ("" if most is None else f" to {most}")
        raise typer.BadParameter(f"{text!r}; allowed is {allowed}")

    return parse


def whole_numbers(least: int, most: int | None = None) -> Callable[[object], Numbers]:
    """A parser of options that take :class:`Numbers`; each number once, the smallest first."""
    parse_one = whole_number(least, most)
    return lambda given: Numbers(sorted({parse_one(each) for each in str(given).split(",")}))


# What `bench` and `tune` ask alike.
HiddenSize = Annotated[
    int, typer.Option(parser=whole_number(1), metavar="ELEMENTS", help="Hidden size.")
]
Tokens = Annotated[
    Numbers,
    typer.Option(parser=whole_numbers(1), metavar="N,N,...", help="Tokens of the calls."),
]
ElementType = Annotated[DType, typer.Option(metavar="DTYPE", help="float32, float16 or bfloat16.")]
NumRounds = Annotated[
    int, typer.Option(parser=whole_number(2), metavar="N", help="Times that each call is timed.")
]


def require_hidden_size(size: int, dtype: DType, fused: bool, option: str) -> None:
    """Refuse a row that is no whole packs or, fused, too large for RMSNorm."""
    most = plan.max_hidden_size(dtype) if fused else None
    if size % dtype.per_pack or (most is not None and size > most):
        allowed = f"allowed with {dtype.value} is a multiple of {dtype.per_pack}"
        allowed += "" if most is None else f" up to {most}"
        raise typer.BadParameter(f"{size}; {allowed}", param_hint=f"'{option}'")


def progress_bar() -> Progress:
    """On stderr, if that is a terminal, and gone at the end."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def failed(message: str) -> typer.Exit:
    """To be raised: the command ends with status 1 after this message."""
    typer.echo(f"Error: {message}", err=True)
    return typer.Exit(1)
