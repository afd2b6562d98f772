"""Checkpoint of virtual ranks: the memory is gone in between, and captured graphs come back right.

Between processes the same job runs in test_cuda_processes.py.
"""

from __future__ import annotations

import process_worker
import pytest
import torch
from cuda_tools import DEVICE, needs_cuda
from harness import check, random_call, stream_of_rank
from workspace_tools import open_workspace

import flashinfer_ar as far


@pytest.fixture(autouse=True)
def short_deadline(monkeypatch):
    monkeypatch.setenv("FLASHINFER_AR_TIMEOUT_S", "20")


@pytest.mark.parametrize("world_size", [1, 3])
def test_three_cycles_with_graphs(world_size, device):
    far.run_ranks(world_size, lambda comm: process_worker.checkpoint(comm, device))
    check(world_size, [random_call(world_size, 3, 64, torch.bfloat16)], device)


GENERATION_BYTES = 64 << 20


@needs_cuda
def test_the_device_gets_its_memory_back():
    def free_bytes(comm):
        comm.barrier()
        free, _ = torch.cuda.mem_get_info(DEVICE)
        comm.barrier()
        return free

    def rank_main(comm):
        size = {"buffer_size_in_bytes": GENERATION_BYTES}
        with stream_of_rank(DEVICE), open_workspace(comm, DEVICE, **size) as workspace:
            before = free_bytes(comm)
            workspace.checkpoint_prepare()
            between = free_bytes(comm)
            workspace.checkpoint_restore()
            return before, between, free_bytes(comm)

    rings_bytes = 2 * 2 * GENERATION_BYTES
    for before, between, after in far.run_ranks(2, rank_main):
        assert between - before >= rings_bytes
        assert between - after >= rings_bytes
