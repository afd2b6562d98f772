"""The ``flashinfer-ar`` command."""

from __future__ import annotations

import typer

from flashinfer_ar.cli import bench, build, doctor, tune

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode="markdown")


@app.callback()
def main() -> None:
    """Allreduce kernels for GPUs joined by NVLink.

    Kernels are compiled when they are first needed; `flashinfer-ar build` does it ahead of time.
    """


for command in (build.build, doctor.doctor, bench.bench, tune.tune):
    app.command()(command)
