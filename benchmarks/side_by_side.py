"""Times flashinfer_ar's kernels and its peers' on one GPU, in one run, each one checked first.

Two harnesses, neither of which has a link:

- ``virtual``: all ranks on this GPU, each with a stream; a peer's memory is an address. Calls run
  from one CUDA graph a rank; a call's time is that of the slowest rank.
- ``feeder``: one rank alone. A small kernel writes what its peers would have sent, then the rank's
  kernel runs; its time is what it adds to the feeder's. Multicast addresses are the rank's own
  memory: FlashInfer's kernel is unmodified, and in ours the one ``multimem.st`` is an ordinary
  store of the same width.

Ratios between contenders of one run mean something; microseconds say nothing about NVLink. Beside
the contenders runs an empty kernel with the grid and launch attributes of ours.

    python -m benchmarks.side_by_side --out build/side_by_side

writes results.json, report.md and plots there. The peers' headers come from the installed package
flashinfer-python (``pip install '.[bench]'``), and nvcc builds them.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # a hardware queue for every rank

import torch

from benchmarks.contender import Contender, Shape, Tensors
from benchmarks.device_code import DeviceCode, StagedFeed
from benchmarks.edited_headers import time_limit
from benchmarks.ours import EPSILON, EmptyKernel, OursFed, OursVirtual
from benchmarks.peers import FlashInferMnnvl, TensorRtLlm, VllmCustom, build
from benchmarks.results import ROWS, LeftOut, Results, Timing, plot, report
from flashinfer_ar import reference, timing
from flashinfer_ar.cli.options import progress_bar
from flashinfer_ar.doctor import nvml
from flashinfer_ar.jit.cache import header_digest

PEERS = {"flashinfer_mnnvl": FlashInferMnnvl, "trtllm": TensorRtLlm, "vllm": VllmCustom}
NUM_LEADING_FED = 2  # alone, a rank has no peers to come into step with
SETUP_LIMIT_S, CELL_LIMIT_S = 240.0, 30.0
ONE_SHOT_TOKENS = (1, 4, 16, 32, 128)
TWO_SHOT_TOKENS = (8, 32, 128, 512)  # 64 KiB to 8 MiB a rank at hidden 4096 to 8192


# ---- Data ---------------------------------------------------------------------------------------


class Data:
    """Inputs of all ranks, poisoned outputs, and what must come out."""

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator(device="cuda").manual_seed(shape.num_tokens)
        size = shape.num_tokens, shape.hidden

        def random(*sizes: int) -> torch.Tensor:
            values = torch.randn(*sizes, generator=generator, device="cuda")
            return values.to(torch.bfloat16) + 0.0  # no -0.0, which peers handle differently

        residual = random(*size) if shape.fused else None
        gamma = random(shape.hidden) if shape.fused else None
        self.shape = shape
        self.ranks = [
            Tensors(
                input=random(*size),
                output=torch.full(size, torch.nan, dtype=torch.bfloat16, device="cuda"),
                residual_in=residual,
                residual_out=None if residual is None else torch.full_like(residual, torch.nan),
                gamma=gamma,
            )
            for _ in range(shape.world_size)
        ]
        inputs = [tensors.input for tensors in self.ranks]
        self.total = reference.allreduce(inputs)
        self.expected = self.total
        if residual is not None and gamma is not None:
            self.expected, _ = reference.allreduce_add_rmsnorm(inputs, residual, gamma, EPSILON)

    def poison(self) -> None:
        for tensors in self.ranks:
            tensors.output.fill_(torch.nan)

    def worst_error(self, ranks: Sequence[int]) -> float:
        """The largest relative error of a rank's output, NaN if something was not written."""
        expected = self.expected.double()
        return max(
            ((self.ranks[rank].output.double() - expected).norm() / expected.norm()).item()
            for rank in ranks
        )

    def is_exact(self, ranks: Sequence[int]) -> bool:
        return all(torch.equal(self.ranks[rank].output, self.expected) for rank in ranks)


def check(contender: Contender, data: Data, ranks: Sequence[int]) -> None:
    """Ours must equal the reference bit for bit, a peer within what its arithmetic explains."""
    if contender.tolerance == math.inf:
        return  # it computes nothing
    error = data.worst_error(ranks)
    tolerance = contender.tolerance
    right = error <= tolerance if tolerance else data.is_exact(ranks)
    if not right:
        raise SystemExit(
            f"{contender.name} is wrong on {data.shape}: relative error {error}, "
            f"allowed {tolerance}"
        )


# ---- Harnesses ----------------------------------------------------------------------------------


class VirtualCell:
    """One contender's graphs of one shape, a rank each."""

    def __init__(
        self, contender: Contender, data: Data, streams: Sequence[torch.cuda.Stream]
    ) -> None:
        self._contender, self._data, self._streams = contender, data, streams
        self._all_ranks = range(data.shape.world_size)
        data.poison()
        torch.cuda.synchronize()
        for rank in self._all_ranks:
            self._launch(rank)
        torch.cuda.synchronize()
        check(contender, data, self._all_ranks)
        self._graphs = [
            timing.TimedGraph(
                streams[rank], timing.NUM_LEADING, lambda rank=rank: self._launch(rank)
            )
            for rank in self._all_ranks
        ]

    def measure(self) -> float:
        for graph in self._graphs:
            graph.replay()
        torch.cuda.synchronize()
        return max(graph.microseconds() for graph in self._graphs)

    def finish(self) -> None:
        """The last replay's result is right too."""
        check(self._contender, self._data, self._all_ranks)

    def _launch(self, rank: int) -> None:
        stream = self._streams[rank]
        with torch.cuda.stream(stream):
            self._contender.launch(
                self._data.shape, rank, self._data.ranks[rank], stream.cuda_stream
            )


class FeederCell:
    """Rank 0 of one contender behind a feeder, and the feeder alone."""

    def __init__(
        self, contender: Contender, data: Data, code: DeviceCode, stream: torch.cuda.Stream
    ) -> None:
        shape = data.shape
        inputs = [tensors.input.data_ptr() for tensors in data.ranks]
        feed = StagedFeed(contender.feed(shape, inputs, data.total.data_ptr()))
        self._contender, self._data = contender, data
        self._feed = feed  # its list of copies must live as long as the graphs

        def feeder() -> None:
            code.launch_feeder(stream.cuda_stream, feed)

        def both() -> None:
            feeder()
            contender.launch(shape, 0, data.ranks[0], stream.cuda_stream)

        data.poison()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            both()
        torch.cuda.synchronize()
        check(contender, data, [0])
        self._both = timing.TimedGraph(stream, NUM_LEADING_FED, both)
        # Writes what is there already: the call has not run, so the generation is the same.
        self._feeder = timing.TimedGraph(stream, NUM_LEADING_FED, feeder)

    def measure(self) -> float:
        self._feeder.replay()
        self._both.replay()
        torch.cuda.synchronize()
        return self._both.microseconds() - self._feeder.microseconds()

    def finish(self) -> None:
        check(self._contender, self._data, [0])


# ---- A run --------------------------------------------------------------------------------------


def measure_cells(
    harness: str, shape: Shape, cells: dict[str, Any], num_rounds: int
) -> list[Timing]:
    """All contenders of a shape, in turns whose order changes from round to round."""
    times = timing.in_turns(list(cells.values()), num_rounds)
    for cell in cells.values():
        cell.finish()
    return [
        Timing.of(harness, name, shape, taken) for name, taken in zip(cells, times, strict=True)
    ]


def make_contenders(
    harness: str, world_size: int, hidden: int, libraries: dict[str, Path]
) -> list[Contender]:
    ours = OursVirtual if harness == "virtual" else OursFed
    most = max(TWO_SHOT_TOKENS)
    return [
        ours(world_size, hidden, most, max(ONE_SHOT_TOKENS)),
        *(
            PEERS[name](library, world_size, most, hidden, harness=harness)
            for name, library in libraries.items()
        ),
    ]


def shapes_of(world_size: int, hidden: int, rows: Sequence[str]) -> Iterator[Shape]:
    for row in rows:
        two_shot, fused = row.startswith("two-shot"), row.endswith("fused")
        for num_tokens in TWO_SHOT_TOKENS if two_shot else ONE_SHOT_TOKENS:
            yield Shape(world_size, hidden, num_tokens, fused, two_shot)


def cells_of(
    harness: str, shape: Shape, contenders: Sequence[Contender], code: DeviceCode, streams: Any
) -> tuple[dict[str, Any], list[LeftOut]]:
    """What can be measured, and what cannot; ours is the first contender."""
    cells, left_out = {}, []
    for contender in contenders:
        reason = contender.refusal(shape)
        if reason is None and harness == "virtual":
            room = contender.room(shape)
            if not room.holds(shape.world_size):
                reason = (
                    f"{shape.world_size} launches of {room.ctas} CTAs cannot wait for each other: "
                    f"the device holds {room.held} at once"
                )
        if reason is not None:
            left_out.append(LeftOut(harness, contender.name, shape, reason))
            continue
        data = Data(shape)
        if isinstance(contender, VllmCustom):
            contender.register([tensors.input.data_ptr() for tensors in data.ranks])
        if harness == "virtual":
            cells[contender.name] = VirtualCell(contender, data, streams)
        else:
            cells[contender.name] = FeederCell(contender, data, code, streams[0])
    empty = EmptyKernel(contenders[0], code)
    if harness == "virtual":
        cells[empty.name] = VirtualCell(empty, data, streams)
    else:
        cells[empty.name] = FeederCell(empty, data, code, streams[0])
    return cells, left_out


def machine(arguments: Sequence[str]) -> dict[str, Any]:
    """Where, when, with what and by which command."""
    return {
        "device": torch.cuda.get_device_name(),
        "driver": nvml.driver_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "kernels": header_digest()[:12],
        "copy_gb_s": round(copy_rate_gb_s()),  # read and written
        "command": shlex.join(["python", "-m", "benchmarks.side_by_side", *arguments]),
    }


def copy_rate_gb_s() -> float:
    """Bytes read and written a second by a large copy in the device's memory."""
    source, target = (torch.zeros(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    start.record()
    for _ in range(5):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return 5 * 2 * source.numel() / start.elapsed_time(end) / 1e6


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--harnesses", nargs="+", default=["feeder", "virtual"])
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096, 5120, 7168, 8192])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--no-peers", action="store_true", help="time flashinfer_ar alone")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 1
    os.environ.setdefault("FLASHINFER_AR_TIMEOUT_S", "10")
    chosen.out.mkdir(parents=True, exist_ok=True)
    results = Results(machine(sys.argv[1:] if arguments is None else arguments))
    groups = list(itertools.product(chosen.harnesses, chosen.world_sizes, chosen.hidden))
    num_shapes = len(list(shapes_of(2, 2, chosen.rows)))
    libraries = {} if chosen.no_peers else build.libraries()
    code = DeviceCode()
    streams = [torch.cuda.Stream() for _ in range(max(chosen.world_sizes))]
    with progress_bar() as progress:
        task = progress.add_task("cells", total=len(groups) * num_shapes)
        for harness, world_size, hidden in groups:
            progress.update(task, description=f"{harness}, {world_size} ranks, hidden {hidden}")
            with time_limit(SETUP_LIMIT_S):
                contenders = make_contenders(harness, world_size, hidden, libraries)
            for shape in shapes_of(world_size, hidden, chosen.rows):
                with time_limit(CELL_LIMIT_S):
                    cells, left_out = cells_of(harness, shape, contenders, code, streams)
                    results.left_out += left_out
                    results.timings += measure_cells(harness, shape, cells, chosen.rounds)
                progress.advance(task)
            for contender in contenders:
                contender.close()
            results.write(chosen.out / "results.json")
    text = report(results)
    (chosen.out / "report.md").write_text(text)
    print(text)
    for path in plot(results, chosen.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
