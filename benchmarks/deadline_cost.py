"""What the deadline of a wait costs: kernels as they are against kernels that would wait for ever.

Both run in one process on one GPU, whose virtual ranks are threads, from CUDA graphs and in turns.
The second kind comes from a copy of the headers without the check in ``Turn::await``; since it
cannot end its own waits, a time limit ends the process if a measurement takes too long.

    python -m benchmarks.deadline_cost --world-sizes 2 8 --rounds 50
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import flashinfer_ar as far
from benchmarks.edited_headers import edited_headers, time_limit
from flashinfer_ar import timing
from flashinfer_ar.bootstrap import CommBackend
from flashinfer_ar.calls import CallShape
from flashinfer_ar.cli.options import progress_bar
from flashinfer_ar.jit import DType, Epilogue

DEVICE = torch.device("cuda", 0)
BUILD_LIMIT_S, SHAPE_LIMIT_S = 300.0, 60.0

HEADER = "lamport.cuh"
CHECK = "      if (++polls % kPollsPerClockRead == 0 && out_of_time(start)) break;\n"


@dataclass(frozen=True)
class Shape:
    """A call of the benchmark, the same on every rank."""

    world_size: int
    hidden: int
    num_tokens: int
    fused: bool

    @property
    def call(self) -> CallShape:
        """As the library has it."""
        epilogue = Epilogue.ADD_RMS_NORM if self.fused else Epilogue.NONE
        one_shot = far.MNNVLAllreduceFusionStrategy.ONESHOT
        return CallShape(self.num_tokens, self.hidden, DType.BFLOAT16, epilogue, one_shot)


@dataclass(frozen=True)
class Result:
    """Microseconds a call of every round, of the slowest rank; pairs belong to one round."""

    shape: Shape
    with_check: Sequence[float]
    without_check: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        """With the check to without it, round by round."""
        return [a / b for a, b in zip(self.with_check, self.without_check, strict=True)]


# ---- Measurement --------------------------------------------------------------------------------


class Variant:
    """One rank's workspace of one kind of kernels, and its graph of each shape."""

    def __init__(self, comm: CommBackend, hidden: int, shapes: Sequence[Shape]) -> None:
        rank, world_size = comm.Get_rank(), comm.Get_size()
        self.workspace = far.MNNVLAllReduceFusionWorkspace(
            far.Mapping(world_size, rank, tp_size=world_size),
            max(shape.num_tokens for shape in shapes),
            hidden,
            torch.bfloat16,
            comm_backend=comm,
            device=DEVICE,
            force_oneshot_support=True,
        )
        self.timers = {shape: timing.timer_of(comm, self.workspace, shape.call) for shape in shapes}


def make_variants(comm: CommBackend, hidden: int, shapes: Sequence[Shape]) -> list[Variant]:
    """With the check and without it; rank 0 edits the headers while its peers wait."""
    made = [Variant(comm, hidden, shapes)]
    comm.barrier()
    without_check = edited_headers(HEADER, CHECK, "")
    with without_check if comm.Get_rank() == 0 else contextlib.nullcontext():
        comm.barrier()
        made.append(Variant(comm, hidden, shapes))
        comm.barrier()
    comm.barrier()
    return made


def measure_shape(
    comm: CommBackend, variants: Sequence[Variant], shape: Shape, num_rounds: int
) -> Result:
    """Rounds of both kinds, in turns."""
    timers = [variant.timers[shape] for variant in variants]
    with time_limit(SHAPE_LIMIT_S) if comm.Get_rank() == 0 else contextlib.nullcontext():
        return Result(shape, *timing.in_turns(timers, num_rounds))


def measure_all(
    world_size: int, shapes: Sequence[Shape], num_rounds: int, on_result: Callable[[], None]
) -> list[Result]:
    """All shapes of one world size, which must have one hidden size."""
    hidden = shapes[0].hidden

    def rank_main(comm: CommBackend) -> list[Result]:
        results = []
        with timing.stream_of_rank(DEVICE):
            with time_limit(BUILD_LIMIT_S) if comm.Get_rank() == 0 else contextlib.nullcontext():
                variants = make_variants(comm, hidden, shapes)
            for shape in shapes:
                results.append(measure_shape(comm, variants, shape, num_rounds))
                if comm.Get_rank() == 0:
                    on_result()
            for variant in variants:
                comm.barrier()
                variant.workspace.close()
        return results

    return far.run_ranks(world_size, rank_main, timeout_s=BUILD_LIMIT_S)[0]


# ---- Report -------------------------------------------------------------------------------------


def report(results: Sequence[Result]) -> str:
    """A Markdown table: medians, and the ratio's median with its quartiles over the rounds."""
    lines = [
        "| ranks | hidden | tokens | kernel | with check, us | without, us | ratio | quartiles |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        shape = result.shape
        low, middle, high = statistics.quantiles(result.ratios, n=4, method="inclusive")
        lines.append(
            f"| {shape.world_size} | {shape.hidden} | {shape.num_tokens} "
            f"| one-shot {'fused' if shape.fused else 'plain'} "
            f"| {statistics.median(result.with_check):.2f} "
            f"| {statistics.median(result.without_check):.2f} "
            f"| {middle:.3f} | {low:.3f} to {high:.3f} |"
        )
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--hidden", type=int, nargs="+", default=[7168, 4096])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rounds", type=int, default=30, help="measurements of each kind")
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 2:
        parser.error(f"--rounds {chosen.rounds}: allowed is a whole number from 2")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 1
    os.environ.setdefault("FLASHINFER_AR_TIMEOUT_S", "10")
    results: list[Result] = []
    groups = list(itertools.product(chosen.world_sizes, chosen.hidden))
    with progress_bar() as progress:
        task = progress.add_task("shapes", total=len(groups) * 2 * len(chosen.tokens))
        for world_size, hidden in groups:
            shapes = [
                Shape(world_size, hidden, num_tokens, fused)
                for num_tokens in chosen.tokens
                for fused in (True, False)
            ]
            progress.update(task, description=f"{world_size} ranks, hidden {hidden}")
            on_result = functools.partial(progress.advance, task)
            results += measure_all(world_size, shapes, chosen.rounds, on_result)
    device = torch.cuda.get_device_name(DEVICE)
    print(f"{device}; {timing.NUM_MEASURED} calls a round, in a CUDA graph")
    print(report(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
