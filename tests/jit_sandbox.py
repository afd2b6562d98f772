"""A kernel cache in a temporary folder with a compiler that counts its runs."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
import warnings
from pathlib import Path

from flashinfer_ar.jit import cache, roots

BUILD = cache.BuildInput("probe_w8", "int f();\n", "kernel.cpp", "kernel.so", ("cc", "-O2"), "cc 1")
OTHER_USER = 12345


class Sandbox:
    def __init__(self, folder, monkeypatch):
        self.root, self.temporary, self.include = (folder / n for n in ("cache", "tmp", "include"))
        self.markers = folder / "markers"
        for made in (self.temporary, self.include, self.markers):
            made.mkdir(mode=0o700)
        self.header = self.include / "a.cuh"
        self.header.write_text("// one\n")
        monkeypatch.setattr(cache, "include_dir", lambda: self.include)
        monkeypatch.setattr(cache, "_fallbacks", itertools.count())
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))
        monkeypatch.setenv("FLASHINFER_AR_CACHE_DIR", str(self.root))
        roots._process_root.cache_clear()

    def build(self, build_input=BUILD, during=lambda: None):
        """Build or find, check as a caller that loads it would, and return the path."""

        def compile_in(folder):
            os.close(tempfile.mkstemp(dir=self.markers)[0])
            source = (folder / build_input.file_name).read_bytes()
            (folder / cache.LOG_NAME).write_text("no complaints\n")
            (folder / build_input.binary_name).write_bytes(b"binary of " + source)
            during()

        binary = cache.cached_binary(build_input, compile_in)
        assert binary.read_bytes() == b"binary of " + build_input.source.encode()
        return binary

    def num_runs(self):
        """Compiler runs so far, of all processes."""
        return len(list(self.markers.iterdir()))

    def entries(self):
        return list(self.root.glob("probe_w8-*"))

    def leftovers(self):
        return list(self.root.glob(".build-*"))


def in_child(function, *arguments):
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking next to torch's threads
        process.start()
    return process


def make_foreign(folder, monkeypatch):
    """Give ``folder`` to another user; without root's rights, let it look so."""
    if os.geteuid() == 0:
        os.chown(folder, OTHER_USER, OTHER_USER)
        return
    real = Path.lstat

    def lstat(path):
        info = list(real(path))
        info[4] = OTHER_USER if path == folder else info[4]
        return os.stat_result(info)

    monkeypatch.setattr(Path, "lstat", lstat)
