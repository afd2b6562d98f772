"""What the doctor says about one thing, and how several things make one verdict."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)


class Status(str, enum.Enum):
    """How much a finding matters.

    ``FAILURE`` keeps allreduce from running on what the machine is for: its GPUs where it has any,
    else its CPU. ``WARNING`` leaves that running, with a limit that the finding names.
    """

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. ``remedy`` is empty where there is nothing to do."""

    topic: str
    status: Status
    seen: str
    meaning: str
    remedy: str = ""


@dataclass(frozen=True)
class Entry:
    """A finding of a report, and the ranks that have it."""

    finding: Finding
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """The findings of all ranks."""

    num_ranks: int
    entries: tuple[Entry, ...]

    @property
    def status(self) -> Status:
        """The worst of the findings."""
        return worst(entry.finding for entry in self.entries)

    def as_json(self) -> dict[str, object]:
        """For machines: these keys stay, topics and texts may change."""
        return {
            "status": self.status.value,
            "num_ranks": self.num_ranks,
            "findings": [
                {**vars(entry.finding), "status": entry.finding.status.value, "ranks": entry.ranks}
                for entry in self.entries
            ],
        }


def worst(findings: Iterable[Finding]) -> Status:
    """The most serious status; ``OK`` if there are no findings."""
    order = list(Status)
    return max((finding.status for finding in findings), key=order.index, default=Status.OK)


def demoted(findings: Iterable[Finding]) -> list[Finding]:
    """The findings with warnings in the place of failures."""
    return [
        replace(each, status=Status.WARNING) if each.status is Status.FAILURE else each
        for each in findings
    ]


def by_value(values: Mapping[int, Value]) -> dict[Value, list[int]]:
    """The numbers (of ranks, of GPUs) that share each value."""
    groups: dict[Value, list[int]] = {}
    for number, value in values.items():
        groups.setdefault(value, []).append(number)
    return groups


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers for a reader: ``0-3, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def grouped(kind: str, values: Mapping[int, str]) -> str:
    """``GPU 0-6: fine; GPU 7: broken``: what each number has, equal ones together."""
    return "; ".join(
        f"{kind} {spans(numbers)}: {value}" for value, numbers in by_value(values).items()
    )
