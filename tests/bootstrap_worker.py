"""One rank of the tests that need real processes: ``bootstrap_worker.py LAUNCHER FOLDER``.

Importing torch takes longer than any of the jobs, so one launch runs all the jobs of a launcher;
each rank writes a job's result to FOLDER/job.rank.json, and :func:`results` reads them.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).parents[1]
NUM_RANKS = 3
TIMEOUT_S = 60


def results(launcher: str, job: str) -> list:
    """What ``job`` returned on each of three processes, in rank order."""
    output, done = _launch(launcher)
    assert len(done[job]) == NUM_RANKS, output
    return done[job]


@functools.cache
def _launch(launcher: str) -> tuple[str, dict[str, list]]:
    with tempfile.TemporaryDirectory() as folder:
        output = "\n".join(_outputs(_commands(launcher, folder)))
        return output, {
            job: [json.loads(path.read_text()) for path in sorted(Path(folder).glob(f"{job}.*"))]
            for job in JOBS[launcher]
        }


def _commands(launcher: str, folder: str) -> list[list[str]]:
    worker = [sys.executable, __file__, launcher, folder]
    if launcher == "torch":
        # A process that Open MPI takes for a job of one would leave a file in /dev/shm.
        lone = ["env", "OMPI_MCA_btl=self"]
        return [[*lone, f"RANK={rank}", *worker] for rank in range(NUM_RANKS)]
    folders = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    mpirun = shutil.which("mpirun", path=folders) or "mpirun"
    flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    return [[mpirun, *flags, "-np", str(NUM_RANKS), *worker]]


def _outputs(commands: list[list[str]]) -> list[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command in commands
    ]
    deadline = time.monotonic() + TIMEOUT_S
    try:
        return [each.communicate(timeout=deadline - time.monotonic())[0] for each in processes]
    finally:
        for process in processes:
            process.kill()


def exchanges(comm) -> dict:
    """Every collective once; the same on all adapters."""
    rank, size = comm.Get_rank(), comm.Get_size()
    half = comm.Split(rank % 2, -rank)
    again = half.Split(0, half.Get_rank()) if rank % 2 == 0 else half
    comm.barrier()
    return {
        "allgather": comm.allgather({"rank": rank, "filler": "x" * 1000 * rank}),
        "bcast": comm.bcast(f"from {rank}", size - 1),
        "place": [rank, size],
        "half": [half.Get_rank(), half.allgather(rank), half.bcast(rank, half.Get_size() - 1)],
        "again": again.allgather(rank),
        "whole": comm.Split(0, -rank).allgather(rank),
    }


def late_peer(comm) -> dict:
    """The last rank comes to a collective long after the deadline of the others."""
    from flashinfer_ar.errors import BootstrapError

    comm.barrier()
    os.environ["FLASHINFER_AR_TIMEOUT_S"] = "0.5"
    if comm.Get_rank() == comm.Get_size() - 1:
        time.sleep(1.5)
    errors, seconds = [], []
    for _ in range(2):
        started = time.monotonic()
        try:
            comm.barrier()
        except BootstrapError as error:
            errors.append(str(error))
        seconds.append(time.monotonic() - started)
    return {"errors": errors, "seconds": seconds}


def lost_peer(comm) -> dict:
    """The last rank ends without a word."""
    from flashinfer_ar.errors import BootstrapError

    comm.barrier()
    if comm.Get_rank() == comm.Get_size() - 1:
        return {"error": None}
    try:
        comm.barrier()
    except BootstrapError as error:
        return {"error": str(error)}
    return {"error": None}


def outsider(comm) -> dict:
    """A torch group that has rank 0 alone."""
    import torch.distributed as dist

    from flashinfer_ar.bootstrap import TorchDistBackend

    group = dist.new_group([0])
    try:
        return {"size": TorchDistBackend(group).Get_size()}
    except ValueError as error:
        return {"size": str(error)}


def no_group(_comm) -> dict:
    """Three processes started as torchrun does, before anything joins them."""
    from flashinfer_ar.bootstrap import default_comm_backend
    from flashinfer_ar.errors import BootstrapError

    try:
        default_comm_backend(NUM_RANKS)
    except BootstrapError as error:
        return {"error": str(error)}
    return {"error": None}


def memory(comm) -> dict:
    """A creation that fails on rank 1, then one that works and that every rank writes to."""
    from flashinfer_ar.errors import SymmetricMemoryError
    from flashinfer_ar.memory import HostSharedMemory, host_shm

    def refuse(path, size_bytes):
        raise OSError(12, "no")

    real_map, rank = host_shm._map, comm.Get_rank()
    names, fds, error_text = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd")), None
    host_shm._map = refuse if rank == 1 else real_map
    try:
        HostSharedMemory.allocate(comm, 4096)
    except SymmetricMemoryError as error:
        error_text = str(error)
    host_shm._map = real_map
    block = HostSharedMemory.allocate(comm, 8200)
    fresh = ctypes.string_at(block.local, 8200) == bytes(8200)
    comm.barrier()
    for peer in block.peers:
        ctypes.memset(peer + 8192 + rank, 10 + rank, 1)
    comm.barrier()
    read = list(ctypes.string_at(block.local + 8192, comm.Get_size()))
    comm.barrier()
    block.close()
    names = {name for name in set(os.listdir("/dev/shm")) - names if "flashinfer_ar" in name}
    return {
        "names_left": sorted(names),
        "error": error_text,
        "fresh": fresh,
        "read": read,
        "fds_left": len(os.listdir("/proc/self/fd")) - fds,
    }


JOBS = {
    "mpi": {"exchanges": exchanges, "memory": memory, "late_peer": late_peer},
    "torch": {
        "no_group": no_group,
        "exchanges": exchanges,
        "memory": memory,
        "outsider": outsider,
        "lost_peer": lost_peer,
    },
}


def init_torch(folder: str) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/.rendezvous",
        rank=int(os.environ["RANK"]),
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=20),
    )


def main(launcher: str, folder: str) -> None:
    from flashinfer_ar.bootstrap import default_comm_backend

    comm = None
    for name, job in JOBS[launcher].items():
        if job is not no_group and comm is None:
            if launcher == "torch":
                init_torch(folder)
            comm = default_comm_backend(NUM_RANKS)
        rank = os.environ["RANK"] if comm is None else comm.Get_rank()
        result = job(comm) | {"adapter": type(comm).__name__}
        partial = Path(folder, f".{name}.{rank}")
        partial.write_text(json.dumps(result))
        partial.rename(Path(folder, f"{name}.{rank}.json"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
