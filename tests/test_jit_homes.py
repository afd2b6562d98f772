"""Homes that cannot hold the kernel cache, and folders that other users lay out (case 22)."""

from __future__ import annotations

import dataclasses
import errno
import os
import pwd
import tempfile
import warnings
from pathlib import Path

import pytest
from jit_sandbox import BUILD, OTHER_USER, Sandbox, make_foreign

from flashinfer_ar.errors import JitError
from flashinfer_ar.jit import roots


@pytest.fixture
def box(tmp_path, monkeypatch):
    return Sandbox(tmp_path, monkeypatch)


def unset_home(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "FLASHINFER_AR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


def no_home(box, monkeypatch):
    def no_entry(uid):
        raise KeyError(uid)

    unset_home(monkeypatch)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)


def home_is_a_file(box, monkeypatch):
    monkeypatch.setenv("FLASHINFER_AR_CACHE_DIR", str(box.header / "cache"))


def cache_is_a_file(box, monkeypatch):
    box.root.write_text("")


def read_only(box, monkeypatch):
    box.root.mkdir(exist_ok=True)
    real = tempfile.mkdtemp

    def mkdtemp(suffix=None, prefix=None, dir=None):
        if dir == box.root:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(suffix, prefix, dir)

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)


def other_users(box, monkeypatch):
    box.root.mkdir()
    make_foreign(box.root, monkeypatch)


def open_to_all(box, monkeypatch):
    box.root.mkdir()
    box.root.chmod(0o777)


def disk_full(box, monkeypatch):
    real = Path.write_bytes

    def write_bytes(path, data):
        if box.root in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)


SPOILED = [
    no_home,
    home_is_a_file,
    cache_is_a_file,
    read_only,
    other_users,
    open_to_all,
    disk_full,
]


@pytest.mark.parametrize("spoil", SPOILED)
def test_unusable_home_costs_one_warning(box, monkeypatch, spoil):
    spoil(box, monkeypatch)
    with pytest.warns(RuntimeWarning, match="kernel cache not usable") as caught:
        first = box.build()
        assert box.build() == first
        box.build(dataclasses.replace(BUILD, source="int g();\n"))
    assert len(caught) == 1
    assert box.num_runs() == 2
    folder = box.temporary / f"flashinfer_ar-{os.geteuid()}"
    assert first.parent.parent == folder
    assert folder.stat().st_mode & 0o777 == 0o700


def test_unset_home_is_looked_up(box, tmp_path, monkeypatch):
    unset_home(monkeypatch)
    entry = pwd.struct_passwd(("me", "x", 1, 1, "", str(tmp_path / "home"), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: entry)
    assert box.build().parent.parent == tmp_path / "home" / ".cache" / "flashinfer_ar"


def test_read_only_cache_still_serves_what_it_has(box, monkeypatch):
    binary = box.build()
    read_only(box, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert box.build() == binary
    assert box.num_runs() == 1


def test_folder_of_root_is_trusted(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
    roots.require_trusted(Path("/usr"))


def test_entry_of_another_user_is_not_loaded(box, monkeypatch):
    binary = box.build()
    make_foreign(binary.parent, monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"owned by user {OTHER_USER}"):
        assert box.build() != binary
    assert box.num_runs() == 2


def squat(folder, monkeypatch):
    folder.mkdir()
    make_foreign(folder, monkeypatch)


def link_away(folder, monkeypatch):
    target = folder.with_name("elsewhere")
    target.mkdir()
    folder.symlink_to(target)


@pytest.mark.parametrize("lay", [squat, link_away])
def test_temporary_folder_laid_by_another_user_is_avoided(box, monkeypatch, lay):
    cache_is_a_file(box, monkeypatch)
    trap = box.temporary / f"flashinfer_ar-{os.geteuid()}"
    lay(trap, monkeypatch)
    with pytest.warns(RuntimeWarning):
        binary = box.build()
    assert binary.parent.parent.parent == box.temporary
    assert not list(trap.iterdir())
    assert box.build() == binary


def test_no_folder_at_all(box, monkeypatch):
    cache_is_a_file(box, monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(box.root))
    with pytest.warns(RuntimeWarning), pytest.raises(JitError, match="no folder to build probe_w8"):
        box.build()
