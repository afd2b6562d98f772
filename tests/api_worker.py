"""One rank of the tests that run the API between processes: ``api_worker.py LAUNCHER JOB...``.

LAUNCHER is ``mpi`` or ``torch``: how the processes were started and meet. A rank prints
``rank R of W: JOB ok`` when a job's checks hold, and ends with a traceback otherwise.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from harness import Strategy, assert_outputs_equal, random_call, run_on_rank

import flashinfer_ar as far

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 120
CPU = torch.device("cpu")


def launch(command, **environment):
    """Run the processes of ``command``; their exit status and all that they printed."""
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return done.returncode, done.stdout


def assert_ok(outcome, world_size, jobs):
    returncode, output = outcome
    assert returncode == 0, output
    for rank, job in itertools.product(range(world_size), jobs):
        assert output.count(f"rank {rank} of {world_size}: {job} ok") == 1, output


def calls(comm):
    """Shapes, dtypes and strategies in turn on one workspace; every output has the right bits."""
    world_size = comm.Get_size()
    shapes = ((1, 256), (2, 64), (world_size + 1, 64), (70, 64), (1, 256), (5, 256))
    listed = [
        random_call(world_size, *shape, dtype, fused=fused, seed=i, strategy=strategy)
        for i, shape in enumerate(shapes)
        for dtype, fused, strategy in (
            (torch.bfloat16, True, Strategy.ONESHOT),
            (torch.bfloat16, False, Strategy.TWOSHOT),
            (torch.bfloat16, True, Strategy.TWOSHOT),
        )
    ]
    outputs = run_on_rank(comm, listed, CPU)
    assert_outputs_equal(outputs, [call.expected() for call in listed], f"rank {comm.Get_rank()}")


def default_group(comm):
    """Without ``comm_backend`` the workspace finds the launcher's group, all of it."""
    rank, world_size = comm.Get_rank(), comm.Get_size()
    call = random_call(world_size, 3, 64, torch.bfloat16)
    mapping = far.Mapping(world_size, rank, tp_size=world_size)
    with far.MNNVLAllReduceFusionWorkspace(
        mapping, 3, 64, torch.bfloat16, device="cpu"
    ) as workspace:
        output = far.trtllm_mnnvl_allreduce(call.inputs[rank], workspace, False)
    assert_outputs_equal([(output,)], [call.expected()], f"rank {rank}")


def lost_peer(comm):
    """The last rank leaves after a good call; the others' next call ends at its deadline."""
    os.environ["FLASHINFER_AR_TIMEOUT_S"] = "3"
    rank, world_size = comm.Get_rank(), comm.Get_size()
    call = random_call(world_size, 2, 64, torch.bfloat16)
    mapping = far.Mapping(world_size, rank, tp_size=world_size)
    workspace = far.MNNVLAllReduceFusionWorkspace(
        mapping, 2, 64, torch.bfloat16, comm_backend=comm, device="cpu"
    )
    arguments = (call.inputs[rank], workspace, False, None, Strategy.ONESHOT)
    far.trtllm_mnnvl_allreduce(*arguments)
    if rank == world_size - 1:
        return
    started = time.monotonic()
    try:
        far.trtllm_mnnvl_allreduce(*arguments)
    except far.AllReduceTimeoutError as error:
        assert f"rank {rank} waited 3 s" in str(error), error
        assert f"for data of rank {world_size - 1}: kernel oneshot (none)" in str(error), error
        assert str(error).endswith("epoch 1. The workspace can only be closed"), error
        assert 3.0 <= time.monotonic() - started < 30.0
    else:
        raise AssertionError("the call returned")
    workspace.close()


JOBS = {"calls": calls, "default_group": default_group, "lost_peer": lost_peer}


def meet(launcher):
    if launcher == "mpi":
        return far.MPIBackend()
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    return far.TorchDistBackend()


def main(launcher, *jobs):
    comm = meet(launcher)
    for job in jobs:
        JOBS[job](comm)
        print(f"rank {comm.Get_rank()} of {comm.Get_size()}: {job} ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
