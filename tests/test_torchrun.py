"""The API between processes that ``torchrun`` started, with a gloo group."""

from __future__ import annotations

import sys

import api_worker
import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without torch.distributed"
)


def torchrun(world_size, jobs):
    flags = ("--standalone", "--nproc-per-node", str(world_size))
    command = (sys.executable, "-m", "torch.distributed.run", *flags)
    return api_worker.launch([*command, api_worker.__file__, "torch", *jobs])


def test_every_rank_is_right():
    jobs = ["calls", "default_group", "lost_peer"]
    api_worker.assert_ok(torchrun(2, jobs), 2, jobs)
