"""What a side-by-side run found: times and what was left out, as JSON, tables and plots."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contender import Shape
from flashinfer_ar.timing import percentiles

OURS = "flashinfer_ar"
EMPTY = "empty kernel"

_LARGE_BYTES = 64 << 20  # more than the L2 of an H200

ROWS = ("one-shot plain", "one-shot fused", "two-shot plain", "two-shot fused")


def row_of(shape: Shape) -> str:
    """Which of ``ROWS`` a shape belongs to."""
    shots = "two-shot" if shape.two_shot else "one-shot"
    return f"{shots} {'fused' if shape.fused else 'plain'}"


@dataclass(frozen=True)
class Timing:
    """Microseconds a call of one contender on one shape."""

    harness: str
    contender: str
    shape: Shape
    median: float
    p5: float
    p95: float

    @classmethod
    def of(cls, harness: str, contender: str, shape: Shape, rounds: Sequence[float]) -> Timing:
        """The summary of at least two rounds."""
        return cls(harness, contender, shape, *percentiles(rounds))


@dataclass(frozen=True)
class LeftOut:
    """A cell that was not measured, and why."""

    harness: str
    contender: str
    shape: Shape
    reason: str


@dataclass(frozen=True)
class Ratio:
    """Our time over that of the best peer, on one shape."""

    shape: Shape
    ours: float
    peer: str
    theirs: float

    @property
    def value(self) -> float:
        """Below 1: ours is faster."""
        return self.ours / self.theirs


@dataclass
class Results:
    """A whole run; ``machine`` says where, when, with what and by which command."""

    machine: Mapping[str, Any]
    timings: list[Timing] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        """What ``write`` wrote."""
        found = json.loads(path.read_text())

        def entries(kind: Any, name: str) -> list[Any]:
            return [kind(**entry | {"shape": Shape(**entry["shape"])}) for entry in found[name]]

        return cls(found["machine"], entries(Timing, "timings"), entries(LeftOut, "left_out"))

    def cells(self, harness: str) -> dict[Shape, dict[str, Timing]]:
        """Contenders' times by shape, in the order of the run."""
        cells: dict[Shape, dict[str, Timing]] = {}
        for timing in self.timings:
            if timing.harness == harness:
                cells.setdefault(timing.shape, {})[timing.contender] = timing
        return cells

    @property
    def harnesses(self) -> list[str]:
        """Those that ran."""
        return list(dict.fromkeys(timing.harness for timing in self.timings))


def ratios(cells: Mapping[Shape, Mapping[str, Timing]]) -> list[Ratio]:
    """One for each shape on which ours and a peer were timed."""
    found = []
    for shape, timings in cells.items():
        peers = {name: each.median for name, each in timings.items() if name not in (OURS, EMPTY)}
        if OURS in timings and peers:
            best = min(peers, key=lambda name: peers[name])
            found.append(Ratio(shape, timings[OURS].median, best, peers[best]))
    return found


def best_of_each(cells: Mapping[Shape, Mapping[str, Timing]]) -> list[Ratio]:
    """Plain calls with each contender's faster algorithm, whichever that is."""
    merged: dict[Shape, dict[str, Timing]] = {}
    for shape, timings in cells.items():
        if shape.fused:
            continue
        best = merged.setdefault(dataclasses.replace(shape, two_shot=False), {})
        for name, timing in timings.items():
            if name not in best or timing.median < best[name].median:
                best[name] = timing
    return ratios(merged)


# ---- Tables -------------------------------------------------------------------------------------


def summary(results: Results) -> str:
    """Geometric means of the ratios, with the worst cell and those above 1."""
    lines = [
        "| harness | calls | cells | geometric mean | by tokens | worst | above 1.0 |",
        "|---|---|---|---|---|---|---|",
    ]
    for harness in results.harnesses:
        cells = results.cells(harness)
        found = ratios(cells)
        groups = {row: [each for each in found if row_of(each.shape) == row] for row in ROWS}
        groups["plain, faster algorithm of each"] = best_of_each(cells)
        lines += [_summary_line(harness, row, group) for row, group in groups.items() if group]
    return "\n".join(lines)


def _summary_line(harness: str, row: str, group: Sequence[Ratio]) -> str:
    by_tokens: dict[int, list[float]] = {}
    for each in group:
        by_tokens.setdefault(each.shape.num_tokens, []).append(each.value)
    means = ", ".join(f"{tokens}: {_mean(by_tokens[tokens]):.2f}" for tokens in sorted(by_tokens))
    worst = max(group, key=lambda each: each.value)
    where = f"{worst.shape.world_size} ranks, [{worst.shape.num_tokens}, {worst.shape.hidden}]"
    above = sum(each.value > 1 for each in group)
    return (
        f"| {harness} | {row} | {len(group)} | {_mean(each.value for each in group):.2f} | {means} "
        f"| {worst.value:.2f} ({where}, {worst.peer}) | {above} |"
    )


def _mean(values: Iterable[float]) -> float:
    return statistics.geometric_mean(list(values))


def all_cells(results: Results) -> str:
    """Every time: median, 5th and 95th percentile, and ours over the best peer's."""
    lines = []
    for harness in results.harnesses:
        cells = results.cells(harness)
        names = list(dict.fromkeys(name for timings in cells.values() for name in timings))
        by_shape = {each.shape: each for each in ratios(cells)}
        lines += [
            f"**{harness}**, microseconds",
            "",
            f"| ranks | hidden | tokens | kernel | {' | '.join(names)} | ratio |",
            f"|{'---|' * (len(names) + 5)}",
        ]
        for shape, timings in cells.items():
            times = " | ".join(
                f"{timings[name].median:.2f} ({timings[name].p5:.2f}-{timings[name].p95:.2f})"
                if name in timings
                else ""
                for name in names
            )
            ratio = f"{by_shape[shape].value:.2f}" if shape in by_shape else ""
            lines.append(
                f"| {shape.world_size} | {shape.hidden} | {shape.num_tokens} | {row_of(shape)} "
                f"| {times} | {ratio} |"
            )
        lines.append("")
    return "\n".join(lines)


def omissions(results: Results) -> str:
    """Cells that were left out, those with one reason together."""
    groups: dict[tuple[str, str, str], int] = {}
    for each in results.left_out:
        key = each.harness, each.contender, each.reason
        groups[key] = groups.get(key, 0) + 1
    return "\n".join(
        f"- {harness}, {contender}, {count} cells: {reason}"
        for (harness, contender, reason), count in groups.items()
    )


def bytes_moved(shape: Shape) -> float:
    """Bytes that all ranks together load and store in a unicast call of ours on one device.

    In messages, a rank: one-shot loads its input twice, stores W - 1 copies, polls (once, if all is
    there) and re-arms W - 1 slots, and stores the output. Two-shot does so with a share of the
    message, publishes and re-arms results, and loads them. Fused: residual in and out, gamma aside.
    """
    peers = shape.world_size - 1
    messages = 3.0 + 3 * peers
    if shape.two_shot:
        messages = 5.0 + 3 * peers / shape.world_size
    return (messages + 2 * shape.fused) * shape.message_bytes * shape.world_size


def bandwidth(results: Results) -> str:
    """Large messages on one device: bytes moved, and their rate over that of a large copy."""
    copy_gb_s = results.machine["copy_gb_s"]
    lines = [
        "| ranks | hidden | tokens | kernel | MB moved | us | GB/s | of the copy rate |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for shape, timings in results.cells("virtual").items():
        if OURS in timings and bytes_moved(shape) >= _LARGE_BYTES:
            us, moved = timings[OURS].median, bytes_moved(shape)
            rate = moved / us / 1e3
            lines.append(
                f"| {shape.world_size} | {shape.hidden} | {shape.num_tokens} | {row_of(shape)} "
                f"| {moved / 1e6:.0f} | {us:.1f} | {rate:.0f} | {rate / copy_gb_s:.2f} |"
            )
    return "\n".join(lines)


def report(results: Results) -> str:
    """All of it, in Markdown."""
    machine = "\n".join(f"- {name}: {value}" for name, value in results.machine.items())
    sections = {
        "Ours over the best peer": summary(results),
        "Left out": omissions(results),
        "Bytes moved by ours, all ranks on one device": bandwidth(results),
        "Every cell": all_cells(results),
    }
    parts = [f"## {title}\n\n{text}\n" for title, text in sections.items()]
    return "\n".join([f"# Side by side\n\n{machine}\n", *parts])


# ---- Plots --------------------------------------------------------------------------------------


def plot(results: Results, folder: Path) -> Iterator[Path]:
    """PNG files: for each harness times against tokens, and ratios against tokens."""
    for harness in results.harnesses:
        cells = results.cells(harness)
        hidden = sorted({shape.hidden for shape in cells})
        shown = 7168 if 7168 in hidden else hidden[0]
        times: dict[Any, dict[str, list[tuple[int, float]]]] = {}
        for shape, timings in cells.items():
            if shape.hidden == shown:
                panel = times.setdefault((row_of(shape), shape.world_size), {})
                for name, timing in timings.items():
                    panel.setdefault(name, []).append((shape.num_tokens, timing.median))
        yield _grid(times, folder / f"{harness}_times.png", f"{harness}, hidden {shown}", "us")
        lines: dict[Any, dict[str, list[tuple[int, float]]]] = {}
        for each in ratios(cells):
            panel = lines.setdefault((row_of(each.shape), each.shape.world_size), {})
            label = f"hidden {each.shape.hidden}"
            panel.setdefault(label, []).append((each.shape.num_tokens, each.value))
        yield _grid(
            lines, folder / f"{harness}_ratios.png", f"{harness}, ours / best peer", "ratio"
        )


def _grid(panels: Mapping[Any, Any], path: Path, title: str, unit: str) -> Path:
    from matplotlib import pyplot  # takes a second to import

    rows = [row for row in ROWS if any(key[0] == row for key in panels)]
    columns = sorted({key[1] for key in panels})
    size = 4 * len(columns), 2.6 * len(rows)
    figure, axes = pyplot.subplots(len(rows), len(columns), figsize=size, squeeze=False)
    for (row, world_size), lines in panels.items():
        axis = axes[rows.index(row)][columns.index(world_size)]
        for label, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=label)
        if unit == "ratio":
            axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set(xscale="log", title=f"{row}, {world_size} ranks", ylabel=unit)
        axis.set_ylim(bottom=0)
        axis.title.set_fontsize(9)
    axes[-1][0].set_xlabel("tokens")
    axes[0][0].legend(fontsize=7)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
    return path
