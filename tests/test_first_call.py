"""The first call of a fresh process finishes, also when modules are loaded lazily."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch


def test_first_call_ever_is_fused_on_all_ranks(device: torch.device) -> None:
    script = Path(__file__).with_name("first_call.py")
    environment = os.environ | {"CUDA_MODULE_LOADING": "LAZY", "FLASHINFER_AR_TIMEOUT_S": "20"}
    done = subprocess.run(
        [sys.executable, str(script), str(device)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("first call ok\n")
