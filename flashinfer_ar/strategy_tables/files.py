"""Strategy tables as files."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashinfer_ar.jit import Epilogue
from flashinfer_ar.jit.spec import MAX_WORLD_SIZE
from flashinfer_ar.strategy_tables.table import UNLIMITED, Entry, Point, Source, Table

_EPILOGUES = [Epilogue.NONE.value, Epilogue.ADD_RMS_NORM.value]
_SOURCES = [each.value for each in Source]


def read(path: Path, target: str) -> Table:
    """The table in a file; ``ValueError`` naming file and field unless it is one for ``target``."""
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8")), target)
    except OSError as error:
        raise ValueError(f"strategy table {path}: cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"strategy table {path}: is not JSON: {error}") from error
    except _WrongField as error:
        raise ValueError(f"strategy table {path}: {error}") from None


class _WrongField(Exception):
    """Which field, what it holds and what is allowed."""


def _parse(content: object, target: str) -> Table:
    if not isinstance(content, dict):
        raise _WrongField("holds no object")
    _field("", content, "target", lambda value: value == target, repr(target))
    runs = _field("", content, "runs", _is_list_of_objects, "a list of objects")
    listed = _field("", content, "entries", _is_list_of_objects, "a list of objects")
    entries = [_entry(f"entries[{i}].", raw, runs) for i, raw in enumerate(listed)]
    keys = [each.key for each in entries]
    for i, key in enumerate(keys):
        if key in keys[:i]:
            raise _WrongField(f"entries[{i}]: world size {key[0]} with {key[1]} a second time")
    return Table(target, tuple(sorted(entries, key=lambda each: each.key)))


def _entry(name: str, raw: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> Entry:
    def field(key: str, ok: Callable[[Any], bool], allowed: str) -> Any:
        return _field(name, raw, key, ok, allowed)

    limit = field("one_shot_max_bytes", _is_limit, "a whole number from 0, or null for no limit")
    world_sizes, places = range(1, MAX_WORLD_SIZE + 1), range(len(runs))
    return Entry(
        world_size=field("world_size", _is_in(world_sizes), f"1 to {MAX_WORLD_SIZE}"),
        epilogue=Epilogue(field("epilogue", _is_one_of(_EPILOGUES), " or ".join(_EPILOGUES))),
        one_shot_max_bytes=UNLIMITED if limit is None else limit,
        source=Source(field("source", _is_one_of(_SOURCES), " or ".join(map(repr, _SOURCES)))),
        run=runs[field("run", _is_in(places), f"the place of one of {len(runs)} runs")],
        points=_points(name, raw),
    )


def _points(name: str, raw: Mapping[str, Any]) -> tuple[Point, ...]:
    try:
        return tuple(Point(int(n), float(one), float(two)) for n, one, two in raw.get("points", ()))
    except (TypeError, ValueError):
        allowed = "lists of message bytes, one-shot us, two-shot us"
        raise _WrongField(f"{name}points: {raw['points']!r}; allowed is {allowed}") from None


def _field(
    name: str, raw: Mapping[str, Any], key: str, ok: Callable[[Any], bool], allowed: str
) -> Any:
    if key not in raw:
        raise _WrongField(f"{name}{key}: missing; allowed is {allowed}")
    if not ok(raw[key]):
        raise _WrongField(f"{name}{key}: {raw[key]!r}; allowed is {allowed}")
    return raw[key]


def _is_one_of(allowed: Sequence[str]) -> Callable[[Any], bool]:
    return lambda value: value in allowed


def _is_in(allowed: range) -> Callable[[Any], bool]:
    # JSON's true is no 1, though Python's is.
    return lambda value: type(value) is int and value in allowed


def _is_limit(value: object) -> bool:
    return value is None or _is_in(range(UNLIMITED))(value)


def _is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def text_of(table: Table) -> str:
    """The file's text: a line an entry, each run once."""
    runs: list[Mapping[str, Any]] = []
    for entry in table.entries:
        if entry.run not in runs:
            runs.append(entry.run)
    lists = {
        "runs": [json.dumps(run) for run in runs],
        "entries": [json.dumps(_raw(entry, runs.index(entry.run))) for entry in table.entries],
    }
    parts = [f'"target": {json.dumps(table.target)}']
    parts += [f'"{name}": [\n  ' + ",\n  ".join(lines) + "\n ]" for name, lines in lists.items()]
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def _raw(entry: Entry, run: int) -> dict[str, Any]:
    limit = entry.one_shot_max_bytes
    raw = {
        "world_size": entry.world_size,
        "epilogue": entry.epilogue.value,
        "one_shot_max_bytes": None if limit == UNLIMITED else limit,
        "source": entry.source.value,
        "run": run,
    }
    return raw | ({"points": entry.points} if entry.points else {})


def write(path: Path, text: str) -> None:
    """Put a file in place whole: who reads it meanwhile sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink()
        raise
