"""What the side-by-side benchmark makes of its times, and that its edits still find their lines."""

from __future__ import annotations

import math

import pytest

from benchmarks import deadline_cost, ours
from benchmarks.contender import Shape
from benchmarks.results import (
    EMPTY,
    OURS,
    LeftOut,
    Results,
    Timing,
    best_of_each,
    bytes_moved,
    ratios,
    report,
    summary,
)
from flashinfer_ar.jit import cache

ONE, TWO = (Shape(4, 4096, 32, fused=False, two_shot=two_shot) for two_shot in (False, True))
FUSED = Shape(4, 4096, 1, fused=True, two_shot=False)


def results(*entries):
    timings = [Timing("virtual", name, shape, us, us, us) for name, shape, us in entries]
    return Results({"device": "none", "copy_gb_s": 1000}, timings)


def test_a_ratio_is_to_the_fastest_peer_and_not_to_the_empty_kernel():
    found = results((OURS, ONE, 3.0), ("a", ONE, 6.0), ("b", ONE, 4.0), (EMPTY, ONE, 0.5))
    [ratio] = ratios(found.cells("virtual"))
    assert (ratio.value, ratio.peer) == (0.75, "b")


def test_no_ratio_without_ours_or_without_a_peer():
    assert ratios(results((OURS, ONE, 3.0), (EMPTY, ONE, 1.0)).cells("virtual")) == []
    assert ratios(results(("a", ONE, 3.0)).cells("virtual")) == []


def test_the_faster_algorithm_of_each_is_compared():
    found = results((OURS, ONE, 3.0), ("a", ONE, 9.0), (OURS, TWO, 5.0), ("a", TWO, 2.0))
    [ratio] = best_of_each(found.cells("virtual"))
    assert (ratio.ours, ratio.theirs) == (3.0, 2.0)


def test_the_summary_has_the_geometric_mean_and_the_worst_cell():
    found = results((OURS, ONE, 1.0), ("a", ONE, 4.0), (OURS, FUSED, 2.0), ("a", FUSED, 1.0))
    found.timings += results(
        (OURS, Shape(4, 4096, 1, fused=False, two_shot=False), 4.0),
        ("a", Shape(4, 4096, 1, fused=False, two_shot=False), 1.0),
    ).timings
    lines = summary(found).splitlines()[2:]
    assert lines[0].startswith("| virtual | one-shot plain | 2 | 1.00 | 1: 4.00, 32: 0.25 | 4.00 ")
    assert lines[0].endswith("| 1 |")
    assert lines[1].startswith("| virtual | one-shot fused | 1 | 2.00 ")


def test_json_and_report(tmp_path):
    found = results((OURS, ONE, 3.0), ("a", ONE, 6.0))
    found.left_out.append(LeftOut("virtual", "b", ONE, "no room"))
    found.write(tmp_path / "results.json")
    assert Results.read(tmp_path / "results.json") == found
    text = report(found)
    assert "- virtual, b, 1 cells: no room" in text
    assert "| 4 | 4096 | 32 | one-shot plain | 3.00 (3.00-3.00) | 6.00 (6.00-6.00) | 0.50 |" in text


@pytest.mark.parametrize("fused", [False, True])
def test_bytes_moved_by_one_rank_are_its_own_tensors(fused):
    """Input twice, output; fused also the residuals."""
    shape = Shape(1, 4096, 32, fused=fused, two_shot=False)
    assert bytes_moved(shape) == (5 if fused else 3) * shape.message_bytes
    two = Shape(8, 4096, 32, fused=fused, two_shot=True)
    one = Shape(8, 4096, 32, fused=fused, two_shot=False)
    assert bytes_moved(two) < bytes_moved(one) / 2
    assert math.isfinite(bytes_moved(two))


@pytest.mark.parametrize(
    ("header", "line"),
    [
        (deadline_cost.HEADER, deadline_cost.CHECK),
        (ours._HEADER, ours._MULTICAST_STORE),
    ],
)
def test_the_lines_that_benchmarks_edit_are_there(header, line):
    text = (cache.include_dir() / "flashinfer_ar" / header).read_text()
    assert text.count(line) == 1
