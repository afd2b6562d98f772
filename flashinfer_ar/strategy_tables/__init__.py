"""Strategy tables: up to which size a message goes one-shot, and where each limit comes from.

A table is a JSON file for one target. Those beside this module are shipped; ``flashinfer-ar tune``
writes one of the user's own, whose entries replace the shipped ones of the same world size and
epilogue::

    {"target": "sm_90a",
     "runs": [{"device": "NVIDIA H200", "date": "2026-12-03", "command": "...", ...}],
     "entries": [{"world_size": 4, "epilogue": "none", "one_shot_max_bytes": 330000,
                  "source": "modelled", "run": 0}, ...]}

``one_shot_max_bytes`` is of one rank's message; ``null``: two-shot never. ``run`` is the place in
``runs`` of what the limit was measured or modelled with. ``points``, where a kernel was timed, are
message bytes, one-shot microseconds and two-shot microseconds.
"""

from __future__ import annotations

import functools
from pathlib import Path

from flashinfer_ar import env
from flashinfer_ar.strategy_tables.files import read, text_of, write
from flashinfer_ar.strategy_tables.table import UNLIMITED, Entry, Point, Source, Table


def table_in_use(target: str) -> Table:
    """The shipped table, updated by the user's; ``ValueError`` if that is no table for it."""
    path = path_in_use(target)
    return shipped(target) if path is None else shipped(target).updated(read(path, target).entries)


def path_in_use(target: str) -> Path | None:
    """The user's table: ``FLASHINFER_AR_STRATEGY_TABLE``, else the one at :func:`user_path`."""
    return env.strategy_table() or _present(user_path(target))


def user_path(target: str) -> Path | None:
    """Where the user's table is sought and ``flashinfer-ar tune`` writes; ``None`` without a home.

    Among the settings and not in the kernel cache, which may be emptied at any time.
    """
    folder = env.config_dir()
    return None if folder is None else folder / "strategy_tables" / f"{target}.json"


@functools.cache
def shipped(target: str) -> Table:
    """The table that comes with the package."""
    return read(Path(__file__).with_name(f"{target}.json"), target)


def _present(path: Path | None) -> Path | None:
    try:
        return path if path is not None and path.exists() else None
    except PermissionError:  # in many containers HOME is another user's, with no table of ours
        return None


__all__ = [
    "UNLIMITED",
    "Entry",
    "Point",
    "Source",
    "Table",
    "path_in_use",
    "read",
    "shipped",
    "table_in_use",
    "text_of",
    "user_path",
    "write",
]
