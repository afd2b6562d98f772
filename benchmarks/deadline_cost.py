"""What the deadline of a wait costs: kernels as they are against kernels that would wait for ever.

Both run in one process on one GPU, whose virtual ranks are threads, from CUDA graphs and in turns.
The second kind comes from a copy of the headers without the check in ``Turn::await``; since it
cannot end its own waits, a watchdog ends the process if a measurement takes too long.

    python benchmarks/deadline_cost.py --world-sizes 2 8 --rounds 50
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import itertools
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

import flashinfer_ar as far
from flashinfer_ar.bootstrap import CommBackend
from flashinfer_ar.jit import cache

DEVICE = torch.device("cuda", 0)
DTYPE = torch.bfloat16
NUM_LEADING = 10  # calls that bring the ranks, whose launches are apart, into step
NUM_MEASURED = 40
NUM_UNMEASURED_ROUNDS = 3
BUILD_LIMIT_S, ROUND_LIMIT_S = 300.0, 20.0

HEADER = "lamport.cuh"
CHECK = "      if (++polls % kPollsPerClockRead == 0 && out_of_time(start)) break;\n"


@dataclass(frozen=True)
class Shape:
    """A call of the benchmark, the same on every rank."""

    world_size: int
    hidden: int
    num_tokens: int
    fused: bool


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


# ---- Kernels without a deadline -----------------------------------------------------------------


@contextlib.contextmanager
def headers_without_check() -> Iterator[None]:
    """Kernels are built from a copy of the headers in which a wait never looks at the clock."""
    from flashinfer_ar.launch import cuda

    real = cache.include_dir
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "include"
        shutil.copytree(real(), copy)
        path = copy / "flashinfer_ar" / HEADER
        text = path.read_text()
        if text.count(CHECK) != 1:
            raise SystemExit(f"{HEADER} has changed: the check is not where this program seeks it")
        path.write_text(text.replace(CHECK, ""))
        cache.include_dir = lambda: copy
        cuda._load_function.cache_clear()  # what is loaded came from the real headers
        try:
            yield
        finally:
            cache.include_dir = real
            cuda._load_function.cache_clear()


@contextlib.contextmanager
def watchdog(limit_s: float) -> Iterator[None]:
    """End the process, and with it every kernel, if the body takes longer."""
    faulthandler.dump_traceback_later(limit_s, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


# ---- Measurement --------------------------------------------------------------------------------


class Variant:
    """One rank's workspace of one kind of kernels, and its graph of each shape."""

    def __init__(self, comm: CommBackend, hidden: int, shapes: Sequence[Shape]) -> None:
        rank, world_size = comm.Get_rank(), comm.Get_size()
        self.workspace = far.MNNVLAllReduceFusionWorkspace(
            far.Mapping(world_size, rank, tp_size=world_size),
            max(shape.num_tokens for shape in shapes),
            hidden,
            DTYPE,
            comm_backend=comm,
            device=DEVICE,
            force_oneshot_support=True,
        )
        self.graphs = {shape: TimedGraph(comm, self.workspace, shape) for shape in shapes}


class TimedGraph:
    """Calls in a row; events inside the graph measure all but the leading ones."""

    def __init__(self, comm: CommBackend, workspace: Any, shape: Shape) -> None:
        self._workspace = workspace
        self._launch = launcher(workspace, shape)
        self._events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)]
        self._graph = torch.cuda.CUDAGraph()
        for turn in range(comm.Get_size()):  # nobody else may use the device meanwhile
            comm.barrier()
            if turn == comm.Get_rank():
                self._capture()
        comm.barrier()

    def _capture(self) -> None:
        stream = torch.cuda.current_stream(DEVICE)
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(NUM_LEADING):
                self._launch()
            self._events[0].record()
            for _ in range(NUM_MEASURED):
                self._launch()
            self._events[1].record()
        torch.cuda.synchronize(DEVICE)

    def measure(self, comm: CommBackend) -> float:
        """Microseconds a call; of the slowest rank, so equal on all of them."""
        comm.barrier()
        self._graph.replay()
        self._workspace.synchronize()
        own = self._events[0].elapsed_time(self._events[1]) * 1e3 / NUM_MEASURED
        return float(max(comm.allgather(own)))


def launcher(workspace: Any, shape: Shape) -> Callable[[], object]:
    """A one-shot call of this shape, on tensors that stay."""
    one_shot = far.MNNVLAllreduceFusionStrategy.ONESHOT

    def ones(*size: int) -> torch.Tensor:
        return torch.ones(*size, dtype=DTYPE, device=DEVICE)

    row = ones(shape.num_tokens, shape.hidden)
    output = torch.empty_like(row)
    if not shape.fused:
        return lambda: far.trtllm_mnnvl_allreduce(row, workspace, True, output, one_shot)
    residual, gamma, residual_out = ones(*row.shape), ones(shape.hidden), torch.empty_like(row)
    return lambda: far.trtllm_mnnvl_fused_allreduce_add_rmsnorm(
        row, residual, gamma, workspace, 1e-5, output, residual_out, True, one_shot
    )


def make_variants(comm: CommBackend, hidden: int, shapes: Sequence[Shape]) -> list[Variant]:
    """With the check and without it; rank 0 edits the headers while its peers wait."""
    made = [Variant(comm, hidden, shapes)]
    comm.barrier()
    with headers_without_check() if comm.Get_rank() == 0 else contextlib.nullcontext():
        comm.barrier()
        made.append(Variant(comm, hidden, shapes))
        comm.barrier()
    comm.barrier()
    return made


def measure_shape(
    comm: CommBackend, variants: Sequence[Variant], shape: Shape, num_rounds: int
) -> Result:
    """Rounds of both kinds, in changing order, so that a drift of the clock meets both alike."""
    times: list[list[float]] = [[], []]
    for number in range(NUM_UNMEASURED_ROUNDS + num_rounds):
        order = (0, 1) if number % 2 else (1, 0)
        for which in order:
            with watchdog(ROUND_LIMIT_S) if comm.Get_rank() == 0 else contextlib.nullcontext():
                took = variants[which].graphs[shape].measure(comm)
            if number >= NUM_UNMEASURED_ROUNDS:
                times[which].append(took)
    return Result(shape, *times)


def measure_all(
    world_size: int, shapes: Sequence[Shape], num_rounds: int, on_result: Callable[[], None]
) -> list[Result]:
    """All shapes of one world size, which must have one hidden size."""
    hidden = shapes[0].hidden

    def rank_main(comm: CommBackend) -> list[Result]:
        results = []
        with torch.cuda.device(DEVICE), torch.cuda.stream(torch.cuda.Stream(DEVICE)):
            with watchdog(BUILD_LIMIT_S) if comm.Get_rank() == 0 else contextlib.nullcontext():
                variants = make_variants(comm, hidden, shapes)
            torch.zeros(1, dtype=torch.int64, device=DEVICE).fill_(1)  # a replay may do this
            torch.cuda.synchronize(DEVICE)
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
    console = Console(stderr=True)
    results: list[Result] = []
    groups = list(itertools.product(chosen.world_sizes, chosen.hidden))
    with Progress(console=console, disable=not console.is_terminal) as progress:
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
    print(f"{torch.cuda.get_device_name(DEVICE)}; {NUM_MEASURED} calls a round, in a CUDA graph")
    print(report(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
