"""The CUDA build of every kernel, without a GPU: its PTX, its resources, its parameter block."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import shutil

import pytest

from flashinfer_ar import plan
from flashinfer_ar.errors import JitError
from flashinfer_ar.jit import (
    HOST_TARGET,
    DType,
    Epilogue,
    KernelKind,
    KernelSpec,
    build,
    cache,
    nvrtc,
)

try:
    nvrtc._identity()
    MISSING = ""
except JitError as error:
    MISSING = str(error)
needs_nvrtc = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def make_spec(kind, epilogue, world_size, hidden_size, multicast, turn):
    """A kernel; ``turn`` walks through all the rest, so that a few builds meet everything."""
    dtype = tuple(DType)[turn % 3]
    target = nvrtc.SUPPORTED_TARGETS[turn // 3 % 3]
    tokens = (1, plan.MANY_TOKENS)[turn % 2]
    if epilogue is Epilogue.NONE:
        hidden_size = None
    hidden_packs = None if hidden_size is None else hidden_size // dtype.per_pack
    return KernelSpec(
        kind=kind,
        dtype=dtype,
        world_size=world_size,
        rank=(0, world_size // 2, world_size - 1)[turn % 3],
        hidden_size=hidden_size,
        epilogue=epilogue,
        geometry=plan.geometry(target, kind, epilogue, hidden_packs, world_size, tokens),
        target=target,
        multicast=multicast,
    )


def make_specs(wanted):
    """The ``wanted`` (world size, hidden size, multicast) of every family of kernels."""
    families = enumerate(itertools.product(KernelKind, Epilogue))
    specs = [
        make_spec(*family, *those, turn=offset + turn)
        for offset, family in families
        for turn, those in enumerate(wanted)
    ]
    return list(dict.fromkeys(specs))  # without an epilogue no hidden size is compiled in


PTX_SPECS = make_specs([*itertools.product((2, 3, 8), (7168,), (False, True)), (72, 7168, True)])
RESOURCE_SPECS = make_specs(
    [
        *itertools.product((8,), (2880, 4096, 5120, 7168, 8192, None), (False,)),
        *itertools.product((2, 16), (4096, 5120, None), (False,)),
        *itertools.product((3, 6), (2880, 5120, 8192), (False,)),
        *itertools.product((2, 3, 16), (7168,), (True,)),
        (72, None, False),
    ]
)


def name_of(spec):
    return f"{spec.target}-{spec.name}"


each_kernel = pytest.mark.parametrize("spec", PTX_SPECS, ids=name_of)
pytestmark = needs_nvrtc


@functools.lru_cache(maxsize=len(PTX_SPECS))
def instructions(spec):
    """The kernel's PTX, an instruction a string, without predicates, labels and directives."""
    ptx = nvrtc.compile_ptx(spec.source(), spec.target)
    lines = (line.strip() for line in ptx.splitlines())
    return [re.sub(r"^@!?%p\d+\s+", "", line) for line in lines if re.match(r"[@a-z]", line)]


def matching(spec, pattern):
    return [line for line in instructions(spec) if re.match(pattern, line)]


def places(spec, pattern):
    return [i for i, line in enumerate(instructions(spec)) if re.match(pattern, line)]


def test_the_subset_meets_everything():
    for specs in (PTX_SPECS, RESOURCE_SPECS):
        met = {(spec.kind, spec.epilogue, spec.dtype) for spec in specs}
        assert len(met) == 12
        assert len({(spec.kind, spec.epilogue, spec.target) for spec in specs}) == 12
        assert len({(spec.kind, spec.epilogue, spec.multicast) for spec in specs}) == 8
        assert len({(spec.dtype, spec.target) for spec in specs}) == 9
    assert {spec.geometry.cluster for spec in RESOURCE_SPECS} == {1, 2, 4, 8}
    assert {spec.geometry.packs_per_thread for spec in RESOURCE_SPECS} == {1, 2}
    assert {spec.hidden_size for spec in RESOURCE_SPECS} == {2880, 4096, 5120, 7168, 8192, None}


# PTX


@each_kernel
def test_ring_accesses_are_relaxed_system_and_sixteen_bytes(spec):
    access = r"(multimem\.st|multimem\.red|ld|st|red|atom)[.\w]*\.sys"
    kinds = {line.split()[0] for line in matching(spec, access)}
    allowed = {"ld.relaxed.sys.global.v4.u32", "st.relaxed.sys.global.v4.u32"}
    if spec.multicast:
        allowed.add("multimem.st.relaxed.sys.global.v4.f32")
    # The timeout record, of which the CPU polls one word.
    assert kinds == allowed | {"st.release.sys.global.u32"}
    assert not matching(spec, r"(ld|st)\.volatile")
    assert not matching(spec, r"multimem\.(?!st\.relaxed\.sys\.global\.v4)")


@each_kernel
def test_every_awaited_slot_is_rearmed(spec):
    """With multicast the own slot is awaited too; a two-shot reader awaits the results besides."""
    packs = spec.geometry.packs_per_thread
    own_too = spec.multicast and spec.kind is KernelKind.ONESHOT
    contributions = spec.world_size if own_too else spec.world_size - 1
    awaited = contributions * packs
    if spec.kind is KernelKind.TWOSHOT:
        owned_at_once = max(8 // spec.world_size, 1)
        awaited = contributions * owned_at_once + packs
    assert len(matching(spec, r"ld\.relaxed\.sys")) == awaited
    stores = len(matching(spec, r"st\.relaxed\.sys"))
    if own_too:  # nothing but re-arms: publication is multicast alone
        assert stores == awaited
    else:
        assert stores > awaited


@each_kernel
def test_the_epoch_advances_without_waiting(spec):
    (advance,) = matching(spec, r"red\b")
    assert re.match(r"red\.relaxed\.gpu\.global\.add\.u32 ", advance)
    # The one other read-modify-write is behind a wait that ran out of time.
    kinds = {line.split()[0] for line in matching(spec, "atom")}
    assert kinds == {"atom.relaxed.gpu.global.exch.b32"}


@each_kernel
def test_nothing_is_stored_and_only_gamma_read_before_the_previous_grid_ended(spec):
    (wait,) = places(spec, r"griddepcontrol\.wait;")
    assert all(place > wait for place in places(spec, r"(st|red|atom|multimem)\.(?!async|shared)"))
    early = [place for place in places(spec, r"ld\.(?!param|shared)") if place < wait]
    fused = spec.epilogue is Epilogue.ADD_RMS_NORM
    assert len(early) == (spec.geometry.packs_per_thread if fused else 0)


@each_kernel
def test_the_next_grid_is_released_once_peers_have_what_they_wait_for(spec):
    """All of this rank's input is on its way and the call is counted; then come the waits."""
    (release,) = places(spec, r"griddepcontrol\.launch_dependents;")
    (count,) = places(spec, r"red\.relaxed\.gpu")
    assert count < release < min(places(spec, r"ld\.relaxed\.sys"))


@each_kernel
def test_every_operation_rounds_once(spec):
    """No contraction, nothing approximate, no flush to zero: what the host computes too."""
    arithmetic = {line.split()[0] for line in matching(spec, r"\w+[.\w]*\.(f32|f16|bf16)(x2)?\b")}
    assert not {name for name in arithmetic if re.search(r"\bfma|\bmad|approx|ftz|full", name)}
    rounding = {name for name in arithmetic if re.match(r"(add|sub|mul|div|rcp|sqrt)\.", name)}
    assert all(re.search(r"\.rn\b", name) for name in rounding)
    if spec.epilogue is Epilogue.ADD_RMS_NORM:
        assert {"add.rn.f32", "mul.rn.f32", "sqrt.rn.f32"} <= arithmetic


@each_kernel
def test_memory_is_global_parameters_and_stated_shared(spec):
    ptx = "\n".join(instructions(spec))
    assert not re.search(r"\b(ld|st)\.local|__local_depot|\bcvta\.local", ptx)
    assert not re.search(r"\.shared \.align \d+ \.b8 (?!shared\[\])", ptx)
    clustered = spec.epilogue is Epilogue.ADD_RMS_NORM and spec.geometry.cluster > 1
    assert bool(matching(spec, r"st\.async\.shared::cluster")) == clustered
    assert bool(matching(spec, r"barrier\.cluster\.")) == clustered


# Resources


@pytest.mark.parametrize("spec", RESOURCE_SPECS, ids=name_of)
def test_no_stack_frame_no_spills_no_static_shared_memory(spec):
    usage = nvrtc.resource_usage(build(spec))
    assert dataclasses.replace(usage, registers=0) == nvrtc.ResourceUsage(0, 0, 0, 0, 0)
    # A CTA must fit its SM: ptxas gives registers to a warp in units of 256.
    assert -(-usage.registers * 32 // 256) * 256 * spec.geometry.warps <= 65536
    assert spec.shared_bytes <= 48 * 1024  # more would need an opt-in at the launch


# The parameter block

LAYOUTS = {
    "a field of another size": ("uint64_t timeout_ns;", "uint32_t timeout_ns;"),
    "two fields exchanged": ("uint32_t num_tokens;\n  uint32_t hidden_packs;",
                             "uint32_t hidden_packs;\n  uint32_t num_tokens;"),
    "a field more": ("uint32_t num_tokens;", "uint32_t more, num_tokens;"),
    "a field more at the end": ("float weight_bias;", "float weight_bias, more;"),
    "another record": ("uint32_t pack;  //", "uint64_t pack;  //"),
    "another control word": ("uint32_t epoch;    //", "uint64_t epoch;    //"),
}  # fmt: skip


@pytest.fixture
def headers(tmp_path, monkeypatch):
    """A copy of the headers that a test may change, and a cache of its own."""
    copy = tmp_path / "include"
    shutil.copytree(cache.include_dir(), copy)
    monkeypatch.setattr(cache, "include_dir", lambda: copy)
    monkeypatch.setenv("FLASHINFER_AR_CACHE_DIR", str(tmp_path / "cache"))
    return copy / "flashinfer_ar"


def change(header, old, new):
    text = header.read_text()
    assert text.count(old) == 1
    header.write_text(text.replace(old, new))


def small_spec(target, epilogue=Epilogue.NONE):
    spec = make_spec(KernelKind.ONESHOT, epilogue, 2, 7168, False, 0)
    hidden_packs = 7168 // spec.dtype.per_pack
    geometry = plan.geometry(target, spec.kind, epilogue, hidden_packs, spec.world_size)
    return dataclasses.replace(spec, target=target, geometry=geometry)


@pytest.mark.parametrize("target", [HOST_TARGET, "sm_90a"])
@pytest.mark.parametrize(("old", "new"), LAYOUTS.values(), ids=LAYOUTS)
def test_another_layout_than_python_s_does_not_compile(old, new, target, headers):
    change(headers / "config.cuh", old, new)
    with pytest.raises(JitError, match=r"jit/params\.py disagrees"):
        build(small_spec(target))


def test_another_amount_of_shared_memory_than_python_s_does_not_compile(headers):
    change(headers / "platform_cuda.cuh", "float values_[2][", "float values_[3][")
    build(small_spec("sm_90a"))
    with pytest.raises(JitError, match=r"jit/spec\.py disagrees"):
        build(small_spec("sm_90a", Epilogue.ADD_RMS_NORM))
