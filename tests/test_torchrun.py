"""The API between processes that ``torchrun`` started, with a gloo group."""

from __future__ import annotations

import sys

import api_worker
import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without torch.distributed"
)


def torchrun(world_size, device, jobs):
    flags = ("--standalone", "--nproc-per-node", str(world_size))
    command = (sys.executable, "-m", "torch.distributed.run", *flags)
    worker = (api_worker.__file__, "torch", device.type, *jobs)
    return api_worker.launch([*command, *worker], FLASHINFER_AR_ALLOW_SHARED_DEVICE="1")


def test_every_rank_is_right(device):
    jobs = ["calls", "default_group", "lost_peer"]
    api_worker.assert_ok(torchrun(2, device, jobs), 2, jobs)
