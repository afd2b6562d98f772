"""The fake driver finds what a real one would not forgive; else its tests could not fail."""

from __future__ import annotations

import ctypes
import os

import pytest
from fake_driver import FakeDriver, driver
from fake_machine import FABRIC, FD, GRANULARITY, Code
from fake_ranks import machine_room


@pytest.fixture
def fake():
    with machine_room() as folder:
        yield FakeDriver(folder)


def properties(handle_type):
    made = driver.CUmemAllocationProp()
    made.location.id = 0
    made.requestedHandleTypes = handle_type
    return made


def ok(answer):
    code, *result = answer
    assert code == Code.CUDA_SUCCESS
    return result[0] if result else None


def create(fake, handle_type=FD):
    ok(fake.cuCtxPushCurrent(fake.context))
    handle = ok(fake.cuMemCreate(GRANULARITY, properties(handle_type), 0))
    base = int(ok(fake.cuMemAddressReserve(GRANULARITY, 0, 0, 0)))
    return handle, base


def double_release(fake, handle, base):
    fake.cuMemRelease(handle)
    fake.cuMemRelease(handle)


def stranger(fake, handle, base):
    fake.cuMemRelease(int(handle) + 1)


def unmap_of_nothing(fake, handle, base):
    fake.cuMemUnmap(base, GRANULARITY)


def map_twice(fake, handle, base):
    fake.cuMemMap(base, GRANULARITY, 0, handle, 0)
    fake.cuMemMap(base, GRANULARITY, 0, handle, 0)


def map_without_addresses(fake, handle, base):
    fake.cuMemMap(base + GRANULARITY, GRANULARITY, 0, handle, 0)


def free_of_a_mapped_range(fake, handle, base):
    fake.cuMemMap(base, GRANULARITY, 0, handle, 0)
    fake.cuMemAddressFree(base, GRANULARITY)


def wrong_export(fake, handle, base):
    fake.cuMemExportToShareableHandle(handle, FABRIC, 0)


def pop_twice(fake, handle, base):
    fake.cuCtxPopCurrent()
    fake.cuCtxPopCurrent()


def no_context(fake, handle, base):
    fake.cuCtxPopCurrent()
    fake.cuMemCreate(GRANULARITY, properties(FD), 0)


def half_a_page(fake, handle, base):
    fake.cuMemCreate(GRANULARITY // 2, properties(FD), 0)


MISUSES = {
    double_release: "cuMemRelease: a handle that is not this rank's",
    stranger: "cuMemRelease: a handle that is not this rank's",
    unmap_of_nothing: "cuMemUnmap: unmap of what is not mapped",
    map_twice: "cuMemMap: map over a mapping",
    map_without_addresses: "cuMemMap: map outside a reservation",
    free_of_a_mapped_range: "cuMemAddressFree: free of a mapped range",
    wrong_export: "cuMemExportToShareableHandle: export as",
    pop_twice: "cuCtxPopCurrent: pop of an empty stack",
    no_context: "cuMemCreate: no context is current",
    half_a_page: "cuMemCreate: size 1048576",
}


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda misuse: misuse.__name__)
def test_misuse_is_found(fake, misuse):
    handle, base = create(fake)
    assert fake.misuses == []
    misuse(fake, handle, base)
    assert fake.misuses[0].startswith(MISUSES[misuse])
    with pytest.raises(AssertionError):
        fake.check_balanced()


@pytest.mark.parametrize("forgotten", ["cuMemRelease", "cuMemUnmap", "cuCtxPopCurrent", "fd"])
def test_what_is_left_over_is_found(fake, forgotten):
    handle, base = create(fake)
    ok(fake.cuMemMap(base, GRANULARITY, 0, handle, 0))
    fd = ok(fake.cuMemExportToShareableHandle(handle, FD, 0))
    steps = {
        "cuMemUnmap": lambda: ok(fake.cuMemUnmap(base, GRANULARITY)),
        "cuMemRelease": lambda: ok(fake.cuMemRelease(handle)),
        "cuCtxPopCurrent": lambda: ok(fake.cuCtxPopCurrent()),
        "fd": lambda: os.close(fd),
    }
    late = steps.pop(forgotten)
    for step in steps.values():
        step()
    if forgotten != "cuMemUnmap":
        ok(fake.cuMemAddressFree(base, GRANULARITY))
    assert len(fake.open_fds()) == (forgotten in ("fd", "cuMemRelease"))
    if forgotten != "fd":
        with pytest.raises(AssertionError):
            fake.check_balanced()
    late()
    if forgotten == "cuMemUnmap":
        ok(fake.cuMemAddressFree(base, GRANULARITY))
    fake.check_balanced()
    assert fake.open_fds() == []


def test_a_fabric_handle_is_taken_as_bytes_like_by_the_real_binding(fake):
    handle, base = create(fake, FABRIC)
    exported = ok(fake.cuMemExportToShareableHandle(handle, FABRIC, 0))
    for api in (fake, driver):
        with pytest.raises(TypeError, match=r"(?i)buffer protocol"):
            api.cuMemImportFromShareableHandle(exported, FABRIC)
    peer = FakeDriver(fake.world, "b")
    imported = ok(peer.cuMemImportFromShareableHandle(exported.data, FABRIC))
    ok(fake.cuMemMap(base, GRANULARITY, 0, handle, 0))
    ok(fake.cuMemSetAccess(base, GRANULARITY, [access()], 1))
    ok(peer.cuCtxPushCurrent(peer.context))
    its_base = int(ok(peer.cuMemAddressReserve(GRANULARITY, 0, 0, 0)))
    ok(peer.cuMemMap(its_base, GRANULARITY, 0, imported, 0))
    ok(peer.cuMemSetAccess(its_base, GRANULARITY, [access()], 1))
    ctypes.memset(base + 5, 9, 1)
    assert ctypes.string_at(its_base + 5, 1) == b"\t"


def access():
    made = driver.CUmemAccessDesc()
    made.location.id = 0
    return made


def test_handles_end_at_the_host_or_the_fabric(fake):
    handle, _ = create(fake, FD)
    fd = ok(fake.cuMemExportToShareableHandle(handle, FD, 0))
    peer = FakeDriver(fake.world, "b")
    assert peer.cuMemImportFromShareableHandle(fd, FD)[0] == Code.CUDA_ERROR_INVALID_VALUE
    assert peer.misuses == ["cuMemImportFromShareableHandle: descriptor of host a on host b"]
    os.close(fd)
    fabric, _ = create(fake, FABRIC)
    exported = ok(fake.cuMemExportToShareableHandle(fabric, FABRIC, 0))
    outsider = FakeDriver(fake.world, "b", cluster="another rack")
    answer = outsider.cuMemImportFromShareableHandle(exported.data, FABRIC)
    assert answer[0] == Code.CUDA_ERROR_NOT_PERMITTED
    none = FakeDriver(fake.world, cluster=None)
    ok(none.cuCtxPushCurrent(none.context))
    refused = none.cuMemCreate(GRANULARITY, properties(FABRIC), 0)
    assert refused[0] == Code.CUDA_ERROR_NOT_PERMITTED
    with pytest.raises(AttributeError, match="the fake driver has no cuInit"):
        fake.cuInit(0)
