"""Mapping: places of a rank, and the arguments it refuses."""

import dataclasses

import pytest

from flashinfer_ar.mapping import Mapping


def test_one_rank_by_default():
    mapping = Mapping()
    assert (mapping.tp_size, mapping.tp_rank, mapping.tp_group) == (1, 0, [0])


def test_tp_size_takes_what_the_others_leave():
    assert Mapping(8, 0, pp_size=2).tp_size == 4
    assert Mapping(8, 0, pp_size=2, cp_size=2).tp_size == 2
    assert Mapping(3, 2, tp_size=3).tp_rank == 2


def test_places_are_numbered_tp_then_cp_then_pp():
    places = [Mapping(12, rank, 4, tp_size=3, cp_size=2, pp_size=2) for rank in range(12)]
    assert [m.tp_rank for m in places] == [0, 1, 2] * 4
    assert [m.cp_rank for m in places] == [0, 0, 0, 1, 1, 1] * 2
    assert [m.pp_rank for m in places] == [0] * 6 + [1] * 6
    assert [m.local_rank for m in places] == [0, 1, 2, 3] * 3
    assert [m.node_rank for m in places] == [0] * 4 + [1] * 4 + [2] * 4
    assert [m.tp_group for m in places[3:6]] == [[3, 4, 5]] * 3
    assert all(m.tp_group[m.tp_rank] == m.rank for m in places)


def test_arguments_of_other_layers_are_kept():
    mapping = Mapping(4, 1, 4, cp_config={"type": 1}, moe_tp_size=2, moe_ep_size=2, attn_tp_size=4)
    assert (mapping.moe_tp_size, mapping.attn_tp_size, mapping.tp_size) == (2, 4, 4)
    assert {mapping: "a dictionary key"}


def test_it_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Mapping(2, 0).rank = 1


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"world_size": 0}, "world_size=0"),
        ({"world_size": 2.0}, "world_size=2.0"),
        ({"world_size": 2, "rank": 2}, "rank=2"),
        ({"world_size": 2, "rank": -1}, "rank=-1"),
        ({"gpus_per_node": 0}, "gpus_per_node=0"),
        ({"cp_size": 0}, "cp_size=0"),
        ({"pp_size": -1}, "pp_size=-1"),
        ({"tp_size": 0}, "tp_size=0"),
        ({"world_size": 4, "tp_size": 3}, "world_size=4: .* 3 [*] 1 [*] 1"),
        ({"world_size": 4, "pp_size": 3}, "world_size=4: .* 1 [*] 1 [*] 3"),
        ({"world_size": 2, "pp_size": 4}, "world_size=2"),
    ],
)
def test_wrong_arguments_are_named(arguments, name):
    with pytest.raises(ValueError, match=name):
        Mapping(**arguments)
