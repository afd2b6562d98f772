"""Fixtures: the device of each substrate, and a kernel cache that the whole run shares."""

from __future__ import annotations

import gc

import pytest
import torch


def _devices() -> list[object]:
    no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    return [
        pytest.param(torch.device("cpu"), id="host"),
        pytest.param(torch.device("cuda", 0), id="cuda", marks=no_gpu),
    ]


@pytest.fixture(params=_devices())
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the ranks' tensors live: the host substrate, and a GPU that all ranks share."""
    device: torch.device = request.param
    return device


@pytest.fixture(autouse=True, scope="module")
def garbage_of_other_modules_is_gone() -> None:
    """Some tests count descriptors, and shared mappings that wait for the collector hold some."""
    gc.collect()
