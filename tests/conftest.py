"""Fixtures: the device of each substrate, and a kernel cache that the whole run shares."""

from __future__ import annotations

import gc
from collections.abc import Iterator

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


@pytest.fixture(autouse=True, scope="session")
def no_settings_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A strategy table of the user's would decide for ``AUTO``, here and in ranks' processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.delenv("FLASHINFER_AR_STRATEGY_TABLE", raising=False)
        yield


@pytest.fixture(autouse=True, scope="module")
def garbage_of_other_modules_is_gone() -> None:
    """Some tests count descriptors, and shared mappings that wait for the collector hold some."""
    gc.collect()
