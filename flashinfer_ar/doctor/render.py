"""Prints a report for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashinfer_ar.doctor.finding import Entry, Report, Status, spans

_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILURE: "bold red"}


def show(report: Report, console: Console) -> None:
    """One row a finding: how it is, what was seen, what that means and what to do."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for entry in report.entries:
        finding = entry.finding
        status = Text(finding.status.value, style=_STYLES[finding.status])
        table.add_row(status, Text(finding.topic, style="bold"), _text(entry, report.num_ranks))
    console.print(table)


def _text(entry: Entry, num_ranks: int) -> Text:
    finding = entry.finding
    text = Text()
    if len(entry.ranks) < num_ranks:
        text.append(f"rank {spans(entry.ranks)}: ", style="bold")
    text.append(finding.seen)
    text.append(f"\n{finding.meaning}", style="dim" if finding.status is Status.OK else "")
    if finding.remedy:
        text.append(f"\n-> {finding.remedy}", style=_STYLES[finding.status])
    return text
