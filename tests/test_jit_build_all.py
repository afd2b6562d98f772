"""Several kernels at once, with a compiler that is a script."""

from __future__ import annotations

import os
import threading

import pytest

from flashinfer_ar import jit
from flashinfer_ar.errors import JitError
from flashinfer_ar.jit import DType, Epilogue, Geometry, KernelKind, KernelSpec, gxx

SPECS = [
    KernelSpec(
        kind=KernelKind.ONESHOT,
        dtype=dtype,
        world_size=2,
        rank=None,
        hidden_size=None,
        epilogue=Epilogue.NONE,
        geometry=Geometry(warps=1, cluster=1, packs_per_thread=1),
        target=jit.HOST_TARGET,
    )
    for dtype in DType
]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The folder where each run of the compiler leaves a file."""
    folder = tmp_path / "runs"
    folder.mkdir()
    monkeypatch.setenv("FLASHINFER_AR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHINFER_AR_CXX", str(tmp_path / "cxx"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(gxx, "_TIMEOUT_S", 10.0)
    return folder


def compile_by(runs, script):
    path = runs.with_name("cxx")
    path.write_text(f"#!/bin/sh\ntouch {runs}/$$\n{script}\n")
    path.chmod(0o755)


def test_builds_what_is_missing_and_keeps_the_order(runs):
    compile_by(runs, "cp kernel.cpp kernel.so")
    second = jit.build(SPECS[1])
    paths = jit.build_all(SPECS)
    assert [path.read_text() for path in paths] == [spec.source() for spec in SPECS]
    assert paths[1] == second
    assert len(list(runs.iterdir())) == len(SPECS)
    assert jit.build_all(SPECS[::-1]) == paths[::-1]
    assert len(list(runs.iterdir())) == len(SPECS)


def test_builds_as_many_at_a_time_as_there_are_cores(runs):
    compile_by(runs, f"while [ $(ls {runs} | wc -l) -lt 2 ]; do sleep 0.01; done; touch kernel.so")
    jit.build_all(SPECS[:2])


def test_raises_what_a_build_raises(runs):
    compile_by(runs, f"grep -q {SPECS[1].name} kernel.cpp && exit 7; touch kernel.so")
    with pytest.raises(JitError, match=rf"building {SPECS[1].name} failed: .*status 7"):
        jit.build_all(SPECS)


def test_nothing_to_build():
    assert jit.build_all([]) == []


def test_begins_nothing_more_once_it_is_closed(monkeypatch):
    begun, go_on = [], threading.Event()

    def build(spec):
        begun.append(spec)
        return spec if spec is SPECS[0] else go_on.wait(10)

    monkeypatch.setattr(jit, "build", build)
    monkeypatch.setattr(jit, "_find", lambda spec: None)
    paths = jit.build_each(SPECS, num_workers=1)
    assert next(paths) is SPECS[0]
    threading.Timer(0.1, go_on.set).start()
    paths.close()
    assert SPECS[2] not in begun
