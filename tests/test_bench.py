"""``flashinfer-ar bench``: what it times, says and writes."""

from __future__ import annotations

import json
import re

import click
import pytest
import torch
from cuda_tools import needs_cuda
from typer.testing import CliRunner

from flashinfer_ar.cli import app

TINY = ("--hidden", "64", "--tokens", "3,1", "--rounds", "5")


def run(*arguments, exit_code=0):
    """All that was printed, on one line and without colors and frames."""
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == exit_code, result.output
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", click.unstyle(result.output)).split())


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def check_rows(found, num_rounds):
    """Times that can be right, in the order of sizes."""
    assert [row["num_tokens"] for row in found["rows"]] == [1, 3]
    assert [row["message_bytes"] for row in found["rows"]] == [128, 3 * 128]
    assert found["num_rounds"] == num_rounds
    for row in found["rows"]:
        for kind in ("one_shot_us", "two_shot_us"):
            assert 0 < row[kind]["p5"] <= row[kind]["median"] <= row[kind]["p95"]
        chosen = row[{"oneshot": "one_shot_us", "twoshot": "two_shot_us"}[row["auto"]]]
        bandwidth = row["message_bytes"] / chosen["median"] / 1e3
        assert row["algorithm_gb_s"] == pytest.approx(bandwidth, abs=1e-6)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("option", "epilogue"), [((), "add_rms_norm"), (("--plain",), "none")], ids=["fused", "plain"]
)
def test_times_both_kernels_on_the_cpu(option, epilogue, tmp_path, monkeypatch):
    table = tmp_path / "strategy.json"
    limit = {"world_size": 3, "epilogue": epilogue, "one_shot_max_bytes": 128}
    entry = limit | {"source": "measured", "run": 0}
    table.write_text(json.dumps({"target": "host", "runs": [{}], "entries": [entry]}))
    monkeypatch.setenv("FLASHINFER_AR_STRATEGY_TABLE", str(table))
    path = tmp_path / "bench.json"
    said = run("--virtual-ranks", "3", *TINY, *option, "--json", str(path))
    assert f"3 virtual ranks, CPU: hidden 64, bfloat16, {epilogue}" in said
    assert "the figures mean nothing for GPUs" in said
    found = json.loads(path.read_text())
    check_rows(found, 5)
    assert (found["world_size"], found["virtual"], found["epilogue"]) == (3, True, epilogue)
    assert [row["auto"] for row in found["rows"]] == ["oneshot", "twoshot"]
    assert (found["strategy_table"], found["source"]) == (str(table), "measured")


@pytest.mark.usefixtures("on_cpu")
def test_two_virtual_ranks_where_nothing_else_is_said():
    assert run(*TINY, "--dtype", "float16").startswith("2 virtual ranks, CPU: hidden 64, float16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tokens 1,,2", "'--tokens': ''; allowed is a whole number from 1"),
        ("--virtual-ranks 73", "'--virtual-ranks': '73'; allowed is a whole number from 1 to 72"),
        ("--hidden 12", "'--hidden': 12; allowed with bfloat16 is a multiple of 8 up to 65536"),
        ("--plain --hidden 12", "'--hidden': 12; allowed with bfloat16 is a multiple of 8"),
        ("--rounds 1", "'--rounds': '1'; allowed is a whole number from 2"),
    ],
)
def test_refused_values(arguments, message):
    assert message in run(*arguments.split(), exit_code=2)


@pytest.mark.usefixtures("on_cpu")
def test_a_wrong_strategy_table_ends_the_command(tmp_path, monkeypatch):
    table = tmp_path / "strategy.json"
    table.write_text('{"target": "sm_90a"}')
    monkeypatch.setenv("FLASHINFER_AR_STRATEGY_TABLE", str(table))
    said = run(*TINY, exit_code=1)
    assert said.startswith("Error: ") and f"strategy table {table}: target: 'sm_90a'" in said


@pytest.mark.usefixtures("on_cpu")
def test_a_place_where_no_file_can_be(tmp_path):
    said = run(*TINY, "--json", str(tmp_path / "none" / "bench.json"), exit_code=1)
    assert "2 virtual ranks, CPU" in said  # the figures are not lost
    assert "Error: --json: " in said and "No such file or directory" in said


def test_no_more_virtual_ranks_than_a_gpu_has_queues(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    said = run("--virtual-ranks", "33", *TINY, exit_code=1)
    assert said == "Error: 33 virtual ranks: allowed on one GPU is 1 to 32"


@needs_cuda
@pytest.mark.parametrize("option", ["--fused", "--plain"])
def test_virtual_ranks_on_a_gpu(option, tmp_path):
    path = tmp_path / "bench.json"
    said = run("--virtual-ranks", "2", *TINY, option, "--json", str(path))
    assert "virtual ranks share one GPU: what the kernels cost, without any NVLink" in said
    found = json.loads(path.read_text())
    check_rows(found, 5)
    assert found["device"] == torch.cuda.get_device_name(0)
    # Orders of magnitude: a kernel takes at least a microsecond, and graphs wait for no CPU.
    assert all(0.5 < row["one_shot_us"]["median"] < 100 for row in found["rows"])
