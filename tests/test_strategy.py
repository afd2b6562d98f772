"""The choice that ``AUTO`` makes: tables, where they are found, and that ranks choose alike."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from workspace_tools import open_workspace, outcomes, this_rank

import flashinfer_ar as far
from flashinfer_ar import env, link_model, plan, strategy_tables
from flashinfer_ar.calls import CallShape
from flashinfer_ar.jit import HOST_TARGET, DType, Epilogue, KernelKind
from flashinfer_ar.jit.nvrtc import SUPPORTED_TARGETS
from flashinfer_ar.strategy import OneShotLimits, one_shot_limits
from flashinfer_ar.strategy_tables import UNLIMITED, Source

Strategy = far.MNNVLAllreduceFusionStrategy
NONE, NORM = Epilogue.NONE, Epilogue.ADD_RMS_NORM
TARGETS = (*SUPPORTED_TARGETS, HOST_TARGET)
each_target = pytest.mark.parametrize("target", TARGETS)
RUN = {"device": "a test's"}


@pytest.fixture(autouse=True)
def no_user_table(tmp_path, monkeypatch):
    monkeypatch.delenv("FLASHINFER_AR_STRATEGY_TABLE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def entry(world_size=3, epilogue="none", limit=100, **fields):
    return {
        "world_size": world_size, "epilogue": epilogue, "one_shot_max_bytes": limit,
        "source": "measured", "run": 0, **fields,
    }  # fmt: skip


def table_file(path, *entries, target=HOST_TARGET, **fields):
    """A table of the user's own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"target": target, "runs": [RUN], "entries": entries} | fields))
    return path


# ---- What is shipped ------------------------------------------------------------------------


@each_target
def test_shipped_tables_cover_every_world_size(target):
    table = strategy_tables.shipped(target)
    assert table.target == target
    for world_size, epilogue in itertools.product(range(1, 73), Epilogue):
        assert table.entry(world_size, epilogue).one_shot_max_bytes > 0


@pytest.mark.parametrize("target", SUPPORTED_TARGETS)
def test_modelled_limits_are_the_model_s(target):
    modelled = [
        each for each in strategy_tables.shipped(target).entries if each.source is Source.MODELLED
    ]
    assert modelled
    for each in modelled:
        link = link_model.Link(**each.run["link"])
        assert link == link_model.LINKS[target]
        assert each.one_shot_max_bytes == link_model.modelled_limit(link, each.world_size)


@each_target
def test_every_limit_says_where_it_comes_from(target):
    for each in strategy_tables.shipped(target).entries:
        assert each.run["date"]
        assert (each.source is Source.MODELLED) == (not each.points)
        assert "model" in each.run or {"device", "command", "kernels"} <= set(each.run)


# ---- The choice -----------------------------------------------------------------------------


def test_auto_goes_one_shot_up_to_the_limit_of_its_epilogue():
    limits = OneShotLimits(plain=100, fused=50)
    kinds = {
        (epilogue, size): limits.resolve(Strategy.AUTO, epilogue, size)
        for epilogue, size in itertools.product((NONE, NORM), (50, 51, 100, 101))
    }
    one_shot = {key for key, kind in kinds.items() if kind is KernelKind.ONESHOT}
    assert one_shot == {(NONE, 50), (NONE, 51), (NONE, 100), (NORM, 50)}
    assert limits.largest == 100


def test_a_forced_strategy_is_not_second_guessed():
    for limit, size in itertools.product((0, UNLIMITED), (16, 1 << 30)):
        limits = OneShotLimits(plain=limit, fused=limit)
        assert limits.resolve(Strategy.ONESHOT, NONE, size) is KernelKind.ONESHOT
        assert limits.resolve(Strategy.TWOSHOT, NONE, size) is KernelKind.TWOSHOT


# ---- The user's table -----------------------------------------------------------------------


def limits_of(*world_sizes, target=HOST_TARGET):
    return [dataclasses.astuple(one_shot_limits(target, each)) for each in world_sizes]


def test_a_world_size_between_two_entries_takes_the_larger_one_s(tmp_path, monkeypatch):
    entries = [entry(4, limit=400), entry(8, limit=80), entry(8, "add_rms_norm", 160)]
    path = table_file(tmp_path / "table.json", *entries)
    monkeypatch.setenv("FLASHINFER_AR_STRATEGY_TABLE", str(path))
    shipped = 65536  # of 72 ranks on the host
    assert limits_of(1, 2, 3, 4) == [(UNLIMITED, UNLIMITED)] * 2 + [(400, 160)] * 2
    assert limits_of(5, 8, 9) == [(80, 160), (80, 160), (shipped, shipped)]


def test_null_is_no_limit_and_zero_is_never(tmp_path, monkeypatch):
    path = table_file(tmp_path / "table.json", entry(limit=None), entry(3, "add_rms_norm", 0))
    monkeypatch.setenv("FLASHINFER_AR_STRATEGY_TABLE", str(path))
    assert limits_of(3) == [(sys.maxsize, 0)]
    assert one_shot_limits(HOST_TARGET, 3).resolve(Strategy.AUTO, NORM, 1) is KernelKind.TWOSHOT


def test_the_file_that_the_variable_names_comes_before_the_user_s(tmp_path, monkeypatch):
    shipped = limits_of(3)
    table_file(strategy_tables.user_path(HOST_TARGET), entry(limit=7))
    assert limits_of(3) == [(7, shipped[0][1])]
    named = table_file(tmp_path / "named.json", entry(limit=8))
    monkeypatch.setenv("FLASHINFER_AR_STRATEGY_TABLE", str(named))
    assert limits_of(3) == [(8, shipped[0][1])]
    assert strategy_tables.path_in_use(HOST_TARGET) == named


def test_a_user_s_table_is_for_its_target_alone():
    table_file(strategy_tables.user_path("sm_90a"), entry(limit=7), target="sm_90a")
    assert strategy_tables.path_in_use(HOST_TARGET) is None
    assert limits_of(3, target="sm_90a")[0][0] == 7


def test_users_without_a_home_or_with_another_user_s(monkeypatch):
    shipped = limits_of(3)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    assert limits_of(3) == shipped
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "expanduser", lambda path: (_ for _ in ()).throw(RuntimeError))
    assert env.config_dir() is None
    assert limits_of(3) == shipped


def test_written_tables_are_read_back(tmp_path):
    points = (strategy_tables.Point(16, 1.5, 2.25),)
    table = strategy_tables.Table(
        "sm_90a",
        (
            strategy_tables.Entry(2, NORM, UNLIMITED, Source.MODELLED, {"model": "a"}),
            strategy_tables.Entry(2, NONE, 0, Source.MEASURED, RUN, points),
            strategy_tables.Entry(4, NONE, 44, Source.MEASURED_KERNELS, RUN, points),
        ),
    )
    path = tmp_path / "new" / "table.json"
    strategy_tables.write(path, strategy_tables.text_of(table))
    assert strategy_tables.read(path, "sm_90a") == table
    assert len(json.loads(path.read_text())["runs"]) == 2
    assert [each.name for each in path.parent.iterdir()] == ["table.json"]


# ---- What is refused ------------------------------------------------------------------------

SOURCES = "'measured' or 'measured kernels, modelled link' or 'modelled'"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON: Expecting property name"),
        (b"\xff", "is not JSON: 'utf-8' codec"),
        ([], "holds no object"),
        ({}, "target: missing; allowed is 'host'"),
        ({"target": "sm_90a"}, "target: 'sm_90a'; allowed is 'host'"),
        ({"target": "host"}, "runs: missing; allowed is a list of objects"),
        ({"target": "host", "runs": {}}, "runs: {}; allowed is a list of objects"),
        ({"target": "host", "runs": [], "entries": [1]},
         "entries: [1]; allowed is a list of objects"),
        (entry(0), "entries[0].world_size: 0; allowed is 1 to 72"),
        (entry(73), "entries[0].world_size: 73; allowed is 1 to 72"),
        (entry(True), "entries[0].world_size: True; allowed is 1 to 72"),
        (entry(2.0), "entries[0].world_size: 2.0; allowed is 1 to 72"),
        (entry(3, "softmax"), "entries[0].epilogue: 'softmax'; allowed is none or add_rms_norm"),
        (entry(3, ["none"]), "entries[0].epilogue: ['none']; allowed is none or add_rms_norm"),
        (entry(limit=-1),
         "entries[0].one_shot_max_bytes: -1; allowed is a whole number from 0, or null"),
        (entry(limit="1 MB"), "entries[0].one_shot_max_bytes: '1 MB'; allowed is a whole number"),
        (entry(source="guessed"), f"entries[0].source: 'guessed'; allowed is {SOURCES}"),
        (entry(run=1), "entries[0].run: 1; allowed is the place of one of 1 runs"),
        (entry(points=[[1, 2]]), "entries[0].points: [[1, 2]]; allowed is lists of message bytes"),
        ({key: value for key, value in entry().items() if key != "one_shot_max_bytes"},
         "entries[0].one_shot_max_bytes: missing; allowed is a whole number from 0, or null"),
    ],
)  # fmt: skip
def test_a_wrong_table_is_refused_by_file_and_field(content, message, tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.write_text(content)
    elif isinstance(content, dict) and "run" in content:
        table_file(path, content)
    else:
        path.write_text(json.dumps(content))
    monkeypatch.setenv("FLASHINFER_AR_STRATEGY_TABLE", str(path))
    with pytest.raises(ValueError) as refused:
        one_shot_limits(HOST_TARGET, 3)
    assert str(refused.value).startswith(f"strategy table {path}: {message}")


def test_one_limit_a_world_size_and_epilogue(tmp_path, monkeypatch):
    path = table_file(tmp_path / "table.json", entry(2), entry(3), entry(2, limit=5))
    monkeypatch.setenv("FLASHINFER_AR_STRATEGY_TABLE", str(path))
    with pytest.raises(ValueError, match=r"entries\[2\]: world size 2 with none a second time"):
        one_shot_limits(HOST_TARGET, 3)


def test_a_named_file_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_AR_STRATEGY_TABLE", str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=r"none\.json: cannot be read: No such file or directory"):
        one_shot_limits(HOST_TARGET, 3)


# ---- Workspaces -----------------------------------------------------------------------------


def kind_of(workspace, num_tokens, epilogue):
    shape = CallShape(num_tokens, 64, DType.BFLOAT16, epilogue, Strategy.AUTO)
    return workspace.prepare(shape).kind


def test_auto_follows_the_user_s_table_as_it_was_at_creation(tmp_path, monkeypatch):
    """A token has 128 bytes here."""
    entries = (entry(limit=256), entry(3, "add_rms_norm", 128))
    path = table_file(tmp_path / "table.json", *entries)
    monkeypatch.setenv("FLASHINFER_AR_STRATEGY_TABLE", str(path))

    def rank_main(comm):
        with open_workspace(comm) as workspace:
            comm.barrier()
            path.unlink(missing_ok=True)
            comm.barrier()
            return [kind_of(workspace, n, each) for each in (NONE, NORM) for n in (1, 2, 3)]

    one, two = KernelKind.ONESHOT, KernelKind.TWOSHOT
    assert far.run_ranks(3, rank_main) == [[one, one, two, one, two, two]] * 3


def test_a_workspace_has_room_for_the_larger_limit(tmp_path, monkeypatch):
    entries = (entry(limit=128), entry(3, "add_rms_norm", 128 * 64))
    path = table_file(tmp_path / "table.json", *entries)
    monkeypatch.setenv("FLASHINFER_AR_STRATEGY_TABLE", str(path))
    sizes = {"max_num_tokens": 64, "hidden_dim": 64, "dtype": torch.bfloat16}
    largest_one_shot = plan.generation_bytes(KernelKind.ONESHOT, 3, 128 * 64)
    asked = (3, 64, 64, torch.bfloat16)

    def rank_main(comm):
        with open_workspace(comm, buffer_size_in_bytes=None, **sizes) as workspace:
            assert workspace.buffer_size_bytes == largest_one_shot
            assert workspace.is_buffer_size_sufficient(*asked)
        needed = workspace.get_required_buffer_size_bytes(*asked, device="cpu")
        with open_workspace(comm, buffer_size_in_bytes=needed - 16) as smaller:
            assert not smaller.is_buffer_size_sufficient(*asked)
        return needed

    assert far.run_ranks(3, rank_main) == [largest_one_shot] * 3


def test_ranks_with_different_tables_are_refused(tmp_path, monkeypatch):
    paths = [table_file(tmp_path / f"{n}.json", entry(limit=n)) for n in (7, 7, 9)]
    monkeypatch.setattr(env, "strategy_table", lambda: paths[this_rank()])
    errors = outcomes(3, open_workspace)
    assert {type(each) for each in errors} == {far.SymmetricMemoryError}
    [text] = {str(each) for each in errors}
    assert text.startswith("ranks disagree on what the strategy table sends one-shot")
    assert "plain=7, " in text and "plain=9, " in text and "on ranks 0; 1; " in text


def test_tables_that_differ_elsewhere_are_no_disagreement(tmp_path, monkeypatch):
    paths = [table_file(tmp_path / f"{n}.json", entry(), entry(8, limit=n)) for n in (7, 8, 9)]
    monkeypatch.setattr(env, "strategy_table", lambda: paths[this_rank()])
    assert outcomes(3, lambda comm: open_workspace(comm).close()) == [None] * 3


def test_a_wrong_table_on_one_rank_is_every_rank_s_error(tmp_path, monkeypatch):
    good = table_file(tmp_path / "good.json", entry())
    bad = table_file(tmp_path / "bad.json", entry(limit=-1))
    monkeypatch.setattr(env, "strategy_table", lambda: bad if this_rank() == 1 else good)
    errors = outcomes(3, open_workspace)
    [text] = {str(each) for each in errors}
    assert f"strategy table {bad}: entries[0].one_shot_max_bytes: -1" in text
    assert "rank 1 on host" in text
