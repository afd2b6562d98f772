"""Folders that may hold compiled kernels: this process loads them, so no other user's count."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import stat
import tempfile
from pathlib import Path

from flashinfer_ar import env


def home_root() -> Path:
    """The cache folder of the user, created if need be; ``OSError`` if it cannot be used."""
    try:
        named = env.cache_dir()
    except RuntimeError as error:  # what pathlib raises for a user without a home
        raise FileNotFoundError(errno.ENOENT, str(error)) from error
    return _open_root(named.resolve())


def temporary_root() -> Path:
    """A private folder for temporary files, one per user; ``OSError`` if there is none."""
    try:
        return _open_root(Path(tempfile.gettempdir(), f"flashinfer_ar-{os.geteuid()}"))
    except OSError:  # another user holds that name
        return _process_root()


@functools.cache
def _process_root() -> Path:
    return Path(tempfile.mkdtemp(prefix="flashinfer_ar-"))


def _open_root(root: Path) -> Path:
    missing = list(itertools.takewhile(lambda path: not path.exists(), (root, *root.parents)))
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    require_trusted(root)
    return root


def require_trusted(folder: Path) -> None:
    """Raise ``OSError`` if another user could have put code into ``folder``.

    Root may own it: an image built as root and run as a user brings its kernels along.
    """
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(folder))
    if info.st_uid not in (os.geteuid(), 0):
        raise PermissionError(errno.EPERM, f"owned by user {info.st_uid}", str(folder))
    if info.st_mode & stat.S_IWOTH:
        raise PermissionError(errno.EPERM, "writable by every user", str(folder))
