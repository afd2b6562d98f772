"""Groups of ranks: how they find each other, and how they agree before a step that may fail."""

from flashinfer_ar.bootstrap.agreement import (
    HostIdentity,
    agree,
    agree_on_value,
    agreed_step,
    host_identity,
)
from flashinfer_ar.bootstrap.comm import CommBackend
from flashinfer_ar.bootstrap.default import default_comm_backend
from flashinfer_ar.bootstrap.in_process import InProcessBackend, in_process_ranks, run_ranks
from flashinfer_ar.bootstrap.mpi import MPIBackend
from flashinfer_ar.bootstrap.torch_dist import TorchDistBackend

__all__ = [
    "CommBackend",
    "HostIdentity",
    "InProcessBackend",
    "MPIBackend",
    "TorchDistBackend",
    "agree",
    "agree_on_value",
    "agreed_step",
    "default_comm_backend",
    "host_identity",
    "in_process_ranks",
    "run_ranks",
]
