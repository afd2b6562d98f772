"""``python -m flashinfer_ar.cli``, where the package is on the path but not installed."""

from flashinfer_ar.cli import app

app(prog_name="flashinfer-ar")
