"""Processes that build one kernel at once, also on file systems that lag behind (case 21)."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import shutil
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jit_sandbox import Sandbox, in_child

from flashinfer_ar.jit import cache


@pytest.fixture
def box(tmp_path, monkeypatch):
    return Sandbox(tmp_path, monkeypatch)


def no_locks(lock, operation):
    raise OSError(errno.ENOLCK, "no locks available")


def refuse_publishing(monkeypatch, error_name):
    number = getattr(errno, error_name)
    real = Path.rename

    def rename(path, target):
        if path.name.startswith(".build-"):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)


@pytest.mark.parametrize("locks", [True, False])
def test_16_processes_cold(box, locks, monkeypatch):
    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    start = multiprocessing.get_context("fork").Barrier(16)

    def build_at_once():
        start.wait(20)
        box.build(during=lambda: time.sleep(0.1))

    processes = [in_child(build_at_once) for _ in range(16)]
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 16
    assert box.num_runs() == 1 if locks else box.num_runs() > 1
    assert len(box.entries()) == 1
    assert not box.leftovers()


def test_threads_of_one_process_compile_once(box):
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(box.build) for _ in range(8)]
        assert len({future.result(20) for future in futures}) == 1
    assert box.num_runs() == 1


def test_lock_that_is_never_released_only_delays(box, monkeypatch):
    monkeypatch.setattr(cache, "_LOCK_WAIT_S", 0.1)
    folder = box.build().parent
    key = folder.name.rpartition("-")[2]
    with (box.root / f".lock-{key[:2]}").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        shutil.rmtree(folder)
        begin = time.monotonic()
        box.build()
    assert 0.1 <= time.monotonic() - begin < 3


def test_loser_of_a_race_uses_the_winners(box, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", no_locks)
    binary = box.build(during=box.build)
    assert [binary.parent] == box.entries()
    assert box.num_runs() == 2
    assert not box.leftovers()


@pytest.mark.parametrize(
    ("error_name", "delay_s"), [("ENOTEMPTY", 3.0), ("EEXIST", 0.1), ("ESTALE", 0.3)]
)
def test_winner_that_shows_late_is_waited_for(box, monkeypatch, error_name, delay_s):
    folder = box.build().parent
    hidden = folder.rename(box.root / "not-yet-visible")
    refuse_publishing(monkeypatch, error_name)
    timer = threading.Timer(delay_s, os.rename, (hidden, folder))
    timer.start()
    begin = time.monotonic()
    assert box.build().parent == folder
    assert delay_s * 0.9 <= time.monotonic() - begin < delay_s + 1.5
    timer.join()
    assert not box.leftovers()


@pytest.mark.parametrize("error_name", ["ENOTEMPTY", "ESTALE", "EXDEV", "EACCES"])
def test_without_a_winner_the_own_copy_serves(box, monkeypatch, error_name):
    monkeypatch.setattr(cache, "_WINNER_WAIT_S", 0.1)
    refuse_publishing(monkeypatch, error_name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [box.build().parent] == box.leftovers()
    assert not box.entries()


def test_rename_whose_answer_was_lost_is_repeated(box, monkeypatch):
    real = Path.rename

    def rename(path, target):
        real(path, target)
        return real(path, target)  # which finds the source gone

    monkeypatch.setattr(Path, "rename", rename)
    assert [box.build().parent] == box.entries()
    assert box.num_runs() == 1


def test_stale_handle_of_an_entry_is_no_damage(box, monkeypatch):
    binary = box.build()
    inode = binary.stat().st_ino
    real, failures = Path.read_bytes, iter(range(2))

    def read_bytes(path):
        if path == binary and next(failures, None) is not None:
            raise OSError(errno.ESTALE, "stale file handle")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert box.build() == binary
    assert binary.stat().st_ino == inode
