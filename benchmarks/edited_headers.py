"""Kernels built from a copy of the headers with one edit: what a line costs is the difference."""

from __future__ import annotations

import contextlib
import faulthandler
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flashinfer_ar.jit import cache
from flashinfer_ar.launch import cuda


@contextlib.contextmanager
def edited_headers(header: str, before: str, after: str) -> Iterator[None]:
    """Inside, kernels are built with the one place of ``before`` in ``header`` replaced."""
    real = cache.include_dir
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "include"
        shutil.copytree(real(), copy)
        path = copy / "flashinfer_ar" / header
        text = path.read_text()
        if text.count(before) != 1:
            raise ValueError(f"{header} has changed: {before.strip()!r} is not there once")
        path.write_text(text.replace(before, after))
        cache.include_dir = lambda: copy
        cuda._load_function.cache_clear()  # what is loaded came from the real headers
        try:
            yield
        finally:
            cache.include_dir = real
            cuda._load_function.cache_clear()


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End the process, and with it every kernel, if the body takes longer."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
