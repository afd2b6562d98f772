"""One rank of the API tests between processes: ``api_worker.py LAUNCHER DEVICE JOB...``.

LAUNCHER is ``mpi`` or ``torch``: how the processes were started and meet. DEVICE is ``cpu`` or
``cuda``: a GPU of its own where there are enough, else ranks share them. A rank prints
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


def calls(comm, device):
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
    outputs = run_on_rank(comm, listed, device)
    assert_outputs_equal(outputs, [call.expected() for call in listed], f"rank {comm.Get_rank()}")


def default_group(comm, device):
    """Without ``comm_backend`` the workspace finds the launcher's group, all of it."""
    rank, world_size = comm.Get_rank(), comm.Get_size()
    call = random_call(world_size, 3, 64, torch.bfloat16)
    mapping = far.Mapping(world_size, rank, tp_size=world_size)
    with far.MNNVLAllReduceFusionWorkspace(
        mapping, 3, 64, torch.bfloat16, device=device
    ) as workspace:
        output = far.trtllm_mnnvl_allreduce(call.inputs[rank].to(device), workspace, False)
    assert_outputs_equal([(output.cpu(),)], [call.expected()], f"rank {rank}")


def lost_peer(comm, device):
    """The last rank leaves after a good call; the others' next call ends at its deadline."""
    os.environ["FLASHINFER_AR_TIMEOUT_S"] = "3"
    rank, world_size = comm.Get_rank(), comm.Get_size()
    call = random_call(world_size, 2, 64, torch.bfloat16)
    mapping = far.Mapping(world_size, rank, tp_size=world_size)
    workspace = far.MNNVLAllReduceFusionWorkspace(
        mapping, 2, 64, torch.bfloat16, comm_backend=comm, device=device
    )
    arguments = (call.inputs[rank].to(device), workspace, False, None, Strategy.ONESHOT)
    far.trtllm_mnnvl_allreduce(*arguments)
    workspace.synchronize()
    if rank == world_size - 1:
        return
    started = time.monotonic()
    try:
        far.trtllm_mnnvl_allreduce(*arguments)
        workspace.synchronize()
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


def part(launcher):
    """End the group: a process that ends with gloo's threads running may be aborted by them."""
    if launcher == "torch":
        torch.distributed.destroy_process_group()


def device_of(name, rank):
    if name == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(name)


def main(launcher, device_name, *jobs):
    comm = meet(launcher)
    device = device_of(device_name, comm.Get_rank())
    for job in jobs:
        JOBS[job](comm, device)
        print(f"rank {comm.Get_rank()} of {comm.Get_size()}: {job} ok", flush=True)
    part(launcher)


if __name__ == "__main__":
    main(*sys.argv[1:])
