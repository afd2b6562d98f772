"""What an entry of the kernel cache is, when it is rebuilt (case 21), and what a failure says."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from jit_sandbox import BUILD, Sandbox, in_child, make_foreign

from flashinfer_ar.errors import JitError
from flashinfer_ar.jit import cache


@pytest.fixture
def box(tmp_path, monkeypatch):
    return Sandbox(tmp_path, monkeypatch)


def test_find_compiles_and_writes_nothing(box):
    assert cache.find(BUILD) is None
    assert not box.entries()
    binary = box.build()
    assert cache.find(BUILD) == binary
    assert cache.find(dataclasses.replace(BUILD, source="int g();\n")) is None
    assert box.num_runs() == 1


def test_find_in_a_cache_that_cannot_be_used(box, monkeypatch):
    box.build()
    make_foreign(box.root, monkeypatch)
    assert cache.find(BUILD) is None


def test_hit_compiles_nothing_and_entry_explains_itself(box):
    binary = box.build()
    assert box.build() == binary
    assert box.num_runs() == 1
    assert binary.parent.parent == box.root
    assert (binary.parent / "kernel.cpp").read_text() == BUILD.source
    assert (binary.parent / cache.LOG_NAME).read_text() == "no complaints\n"
    assert (binary.parent / cache.COMMAND_NAME).read_text().startswith("cc -O2 -I/")
    check = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=binary.parent, check=False).returncode == 0
    assert not box.leftovers()


@pytest.mark.parametrize(
    "change",
    [
        {"source": "int g();\n"},
        {"command": ("cc", "-O3")},
        {"command": ("cc -O2",)},
        {"compiler": "cc 2"},
        {"file_name": "kernel.cu"},
        {"binary_name": "kernel.cubin"},
    ],
)
def test_whatever_goes_into_a_binary_is_in_its_key(box, change):
    assert box.build().parent != box.build(dataclasses.replace(BUILD, **change)).parent
    assert box.num_runs() == 2


def test_name_must_be_safe():
    for name in ("", "a/b", "a\n", "a" * 129):
        with pytest.raises(ValueError, match="name="):
            dataclasses.replace(BUILD, name=name)


def test_nobody_else_can_write_whatever_the_umask(box):
    before = os.umask(0)
    try:
        binary = box.build()
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (box.root, binary.parent)} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in binary.parent.iterdir()} == {0o600}


def test_header_changed_with_old_time_rebuilds(box):
    info = box.header.stat()
    first = box.build()
    box.header.write_text("// two\n")
    os.utime(box.header, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert box.header.stat().st_size == info.st_size
    assert box.build() != first
    assert box.num_runs() == 2


def test_touched_header_does_not_rebuild(box):
    first = box.build()
    os.utime(box.header, (2e9, 2e9))
    assert box.build() == first
    assert box.num_runs() == 1


def test_renamed_and_added_headers_rebuild(box):
    box.build()
    box.header.rename(box.include / "b.cuh")
    box.build()
    (box.include / "deep").mkdir()
    (box.include / "deep" / "c.cuh").write_text("")
    box.build()
    assert box.num_runs() == 3


def test_header_changed_during_the_build_is_not_published(box):
    box.build(during=lambda: box.header.write_text("// two\n"))
    assert not box.entries()
    box.header.write_text("// one\n")
    box.build()
    assert box.num_runs() == 2


def truncate(binary):
    os.truncate(binary, 3)


def flip(binary):
    binary.write_bytes(binary.read_bytes()[:-1] + b"?")


def unlink_sums(binary):
    (binary.parent / "SHA256SUMS").unlink()


def lose_power(binary):
    """What a disk may hold of an entry that was never synced: its names, nothing in its files."""
    for path in binary.parent.iterdir():
        os.truncate(path, 0)


def become_a_file(binary):
    shutil.rmtree(binary.parent)
    binary.parent.write_text("")


DAMAGES = [truncate, flip, Path.unlink, unlink_sums, lose_power, become_a_file]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_rebuilt(box, damage):
    binary = box.build()
    damage(binary)
    assert cache.find(BUILD) is None
    assert box.build() == binary
    assert box.num_runs() == 2
    assert len(box.entries()) == 1
    assert not box.leftovers()


def die_half_way(folder):
    (folder / "kernel.so").write_bytes(b"bin")
    os.kill(os.getpid(), signal.SIGKILL)


def test_build_killed_half_way_leaves_nothing_visible(box):
    process = in_child(cache.cached_binary, BUILD, die_half_way)
    process.join(10)
    assert process.exitcode == -signal.SIGKILL
    assert not box.entries()
    box.build()
    assert box.num_runs() == 1
    (stage,) = box.leftovers()  # not removed yet: it could be a live build
    os.utime(stage, (1e9, 1e9))
    box.build(dataclasses.replace(BUILD, source="int g();\n"))
    assert not box.leftovers()


def interrupt():
    raise KeyboardInterrupt


def test_interrupted_build_cleans_up(box):
    with pytest.raises(KeyboardInterrupt):
        box.build(during=interrupt)
    assert not box.entries()
    assert not box.leftovers()


def refuse(folder):
    (folder / cache.LOG_NAME).write_text("\n".join(f"complaint {n}." for n in range(150)))
    raise JitError("the compiler ended with status 1")


def test_failed_build_shows_command_log_and_source(box):
    for _ in range(2):
        with pytest.raises(JitError) as caught:
            cache.cached_binary(BUILD, refuse)
    text = str(caught.value)
    assert text.startswith("building probe_w8 failed: the compiler ended with status 1")
    assert "cc -O2 -I/" in text
    assert "compiler: cc 1" in text
    assert "complaint 50." in text
    assert "complaint 149." in text
    assert "complaint 49." not in text
    (kept,) = box.root.glob("failed-*")  # of two failures, one
    assert f"source:   {kept / 'kernel.cpp'}" in text
    assert (kept / "kernel.cpp").read_text() == BUILD.source
    assert not box.entries()
    assert not box.leftovers()
    box.build()


def test_compiler_that_leaves_nothing(box):
    with pytest.raises(JitError, match=r"the compiler left no kernel\.so"):
        cache.cached_binary(BUILD, lambda folder: None)
    assert not box.entries()
