"""Geometry, grid and slots: pure functions that every rank computes alike."""

from __future__ import annotations

import pytest

from flashinfer_ar import plan
from flashinfer_ar.jit import HOST_TARGET, DType, Epilogue, Geometry, KernelKind
from flashinfer_ar.jit.nvrtc import SUPPORTED_TARGETS

TARGETS = (HOST_TARGET, *SUPPORTED_TARGETS)
HIDDEN_PACKS = (1, 7, 8, 15, 31, 32, 33, 125, 128, 129, 360, 512, 513, 896, 897, 1024, 2048, 2049,
                4096, 4097, 6000, 8191, 8192)  # fmt: skip
WORLD_SIZES = (1, 2, 3, 4, 5, 8, 12, 36, 71, 72)
NUM_PACKS = (1, 2, 31, 32, 33, 63, 64, 96, 97, 1000, 4096, 12345)

each_target = pytest.mark.parametrize("target", TARGETS)
each_kind = pytest.mark.parametrize("kind", KernelKind)
each_width = pytest.mark.parametrize("world_size", [2, 8, 16, 72])
each_load = pytest.mark.parametrize("tokens", [1, plan.MANY_TOKENS], ids=["few", "many"])


@each_target
@pytest.mark.parametrize("epilogue", Epilogue)
@each_width
@each_load
@each_kind
def test_a_row_fits_its_cluster(target, kind, epilogue, world_size, tokens):
    for hidden_packs in (None, *HIDDEN_PACKS):
        shape = plan.geometry(target, kind, epilogue, hidden_packs, world_size, tokens)
        assert 32 <= shape.threads <= 1024, hidden_packs
        assert shape.cluster in (1, 2, 4, 8), hidden_packs
        assert shape.packs_per_thread >= 1, hidden_packs
        if epilogue is Epilogue.ADD_RMS_NORM:
            assert shape.row_packs >= (hidden_packs or plan._MAX_ROW_PACKS)


@pytest.mark.parametrize("target", SUPPORTED_TARGETS)
@each_width
@each_load
def test_no_cta_of_a_token_idles(target, world_size, tokens):
    """Each CTA of the cluster holds a part of the token, else it would only cost."""
    for packs in HIDDEN_PACKS:
        shape = plan.geometry(
            target, KernelKind.ONESHOT, Epilogue.ADD_RMS_NORM, packs, world_size, tokens
        )
        assert (shape.cluster - 1) * shape.packs_per_thread * shape.threads < packs
        assert shape.packs_per_thread <= 2, packs


@each_width
@each_load
@pytest.mark.parametrize("target", SUPPORTED_TARGETS)
@pytest.mark.parametrize("epilogue", Epilogue)
@each_kind
def test_ctas_that_share_an_sm_leave_registers(target, kind, epilogue, world_size, tokens):
    """Fewer than these would spill (test_compile.py): batches of slots are wide.

    Up to 6 ranks 96 are enough, and worth it where they make room for a second CTA.
    """
    needed = 128 if world_size > 8 or kind is KernelKind.TWOSHOT else 64
    for hidden_packs in (None, *HIDDEN_PACKS):
        shape = plan.geometry(target, kind, epilogue, hidden_packs, world_size, tokens)
        twice_ten = world_size <= 6 and shape.warps in (9, 10) and shape.ctas_per_sm == 2
        least = 96 if twice_ten else needed
        assert 65536 // (shape.threads * shape.ctas_per_sm) >= least, hidden_packs


@pytest.mark.parametrize("target", SUPPORTED_TARGETS)
def test_few_tokens_are_spread_and_many_are_not(target):
    few, many = (
        plan.geometry(target, KernelKind.ONESHOT, Epilogue.ADD_RMS_NORM, 896, 8, tokens)
        for tokens in (1, plan.MANY_TOKENS)
    )
    assert few.cluster > many.cluster
    borders = [
        plan.geometry(target, KernelKind.ONESHOT, Epilogue.ADD_RMS_NORM, 896, 8, tokens)
        for tokens in range(1, 200)
    ]
    assert borders == sorted(borders, key=lambda shape: shape == many)
    assert plan.max_clusters(target, few, 1, None) >= borders.index(many)  # one row a cluster


def test_larger_tokens_get_no_fewer_threads():
    shapes = [
        plan.geometry("sm_90a", KernelKind.ONESHOT, Epilogue.ADD_RMS_NORM, packs, 8)
        for packs in HIDDEN_PACKS
    ]
    assert [shape.cluster for shape in shapes] == sorted(shape.cluster for shape in shapes)
    capacities = [shape.row_packs for shape in shapes]
    assert capacities == sorted(capacities)


def test_the_host_builds_few_kernels():
    geometries = {
        plan.geometry(HOST_TARGET, KernelKind.ONESHOT, Epilogue.ADD_RMS_NORM, packs, 2)
        for packs in range(1, 8193)
    }
    assert len(geometries) == 9
    assert {shape.cluster for shape in geometries} == {1}


@pytest.mark.parametrize("dtype", DType)
def test_the_largest_hidden_size_has_a_geometry(dtype):
    packs = plan.max_hidden_size(dtype) // dtype.per_pack
    for target in TARGETS:
        assert (
            plan.geometry(target, KernelKind.ONESHOT, Epilogue.ADD_RMS_NORM, packs, 2).row_packs
            >= packs
        )
        assert (
            plan.geometry(target, KernelKind.ONESHOT, Epilogue.ADD_RMS_NORM, None, 2).row_packs
            >= packs
        )


# Grids


@each_target
@pytest.mark.parametrize("ranks_on_device", [1, 2, 3, 8, 72])
def test_ranks_on_one_device_share_its_room(target, ranks_on_device):
    for cluster, num_sms in plan._NUM_SMS[target].items():
        shape = Geometry(4, cluster, 1, ctas_per_sm=2)
        alone = plan.max_clusters(target, shape, 1, None)
        shared = plan.max_clusters(target, shape, ranks_on_device, None)
        assert 1 <= shared <= alone
        # A cluster must not be cut, and one is the least.
        assert shared == 1 or shared * cluster * ranks_on_device <= 2 * num_sms


@each_target
@pytest.mark.parametrize("ranks_on_device", [1, 2, 3, 8, 72])
def test_grids_that_start_early_have_room_beside_those_they_follow(target, ranks_on_device):
    """Else a rank's first grid could find no room, and the others' grids wait for it for ever."""
    for cluster, num_sms in plan._NUM_SMS[target].items():
        shape = Geometry(4, cluster, 1, ctas_per_sm=2)
        largest = plan.max_clusters(target, shape, ranks_on_device, None)
        sizes = range(1, largest + 40)
        released = [n for n in sizes if plan.releases_early(target, shape, ranks_on_device, n)]
        early = [n for n in sizes if plan.may_start_early(target, shape, ranks_on_device, n)]
        if ranks_on_device == 1:
            assert early == list(sizes)
        elif early:
            most = max(early) + max(released, default=0)
            assert most * cluster * ranks_on_device <= 2 * num_sms
            assert largest in early


@pytest.mark.parametrize(
    ("max_ctas", "cluster", "clusters"), [(1, 1, 1), (1, 8, 1), (8, 8, 1), (17, 8, 2), (20, 1, 20)]
)
def test_the_environment_s_cap_counts_ctas(max_ctas, cluster, clusters):
    assert plan.max_clusters("sm_90a", Geometry(4, cluster, 1), 4, max_ctas) == clusters


def test_rows_are_tokens_only_where_tokens_matter():
    shape = Geometry(warps=1, cluster=1, packs_per_thread=4)  # 128 packs a row
    assert plan.num_rows(shape, Epilogue.ADD_RMS_NORM, 5, 128) == 5
    rows = {packs: plan.num_rows(shape, Epilogue.NONE, 1, packs) for packs in (1, 128, 129, 256)}
    assert rows == {1: 1, 128: 1, 129: 2, 256: 2}
    assert plan.num_rows(shape, Epilogue.NONE, 3, 43) == 2


# Slots


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("num_packs", NUM_PACKS)
def test_slots_follow_the_layouts_of_the_kernels(world_size, num_packs):
    """One more than the highest slot that oneshot.cuh and twoshot.cuh describe."""
    one_shot = (world_size - 1) * num_packs + num_packs - 1
    assert plan.slots(KernelKind.ONESHOT, world_size, num_packs) == one_shot + 1
    num_stripes = -(-num_packs // 32)
    owner_packs = len(range(0, num_stripes, world_size)) * 32  # rank 0 owns the most
    two_shot = world_size * owner_packs + num_packs
    assert plan.slots(KernelKind.TWOSHOT, world_size, num_packs) == two_shot


@pytest.mark.parametrize("kind", KernelKind)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_larger_message_needs_no_less_room(kind, world_size):
    """A workspace that is sized for its largest message holds every smaller one."""
    sizes = [plan.generation_bytes(kind, world_size, n) for n in range(0, 4096 * 16, 40)]
    assert sizes == sorted(sizes)
    assert all(size % 16 == 0 for size in sizes)


# Caps


def test_every_target_has_its_caps():
    assert set(plan._NUM_SMS) == set(TARGETS)
