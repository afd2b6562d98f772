"""What the tests of the workspace share: making one, looking into its ring, what ranks raise."""

from __future__ import annotations

import ctypes
import threading

import torch

import flashinfer_ar as far

SENTINEL = 0x80000000
CPU = torch.device("cpu")


def this_rank():
    """The rank whose thread this is (:func:`flashinfer_ar.run_ranks` names them)."""
    return int(threading.current_thread().name.removeprefix("rank "))


def open_workspace(comm, device=CPU, **arguments):
    rank, size = comm.Get_rank(), comm.Get_size()
    mapping = arguments.pop("mapping", far.Mapping(size, rank, tp_size=size))
    return far.MNNVLAllReduceFusionWorkspace(
        mapping, comm_backend=comm, device=device, **{"buffer_size_in_bytes": 65536} | arguments
    )


def outcomes(world_size, rank_main, timeout_s=20.0):
    """What each rank raised; ``None`` for a rank that did not."""

    def rank_outcome(comm):
        try:
            rank_main(comm)
        except Exception as error:
            return error

    return far.run_ranks(world_size, rank_outcome, timeout_s=timeout_s)


def words_at(workspace, address, size_bytes):
    """The 32-bit words of a block of this rank's memory."""
    data = bytearray(size_bytes)
    if workspace.device.type == "cpu":
        data[:] = ctypes.string_at(address, size_bytes)
    else:
        from cuda.bindings import driver

        from flashinfer_ar.driver import checked, current_context, primary_context

        with current_context(primary_context(workspace.device.index)):
            checked(driver.cuMemcpyDtoH, data, address, size_bytes)
    return torch.frombuffer(data, dtype=torch.uint32).to(torch.int64)


def ring_words(workspace):
    """A row a generation."""
    words = words_at(workspace, workspace.uc_ptr_local, workspace.workspace_size_bytes)
    return words.view(2, -1)


def is_armed(workspace):
    return bool((ring_words(workspace) == SENTINEL).all())


def epoch_word(workspace):
    """Calls completed * 65536, between calls."""
    return int(words_at(workspace, workspace._substrate.control, 4))
