"""Tensor-parallel allreduce over NVLink, fused with residual add and RMSNorm.

Kernels are compiled at run time, one instance a configuration. Tensors decide where a call runs:
CUDA tensors on the GPU, CPU tensors on the host build of the same kernels. Importing touches no GPU
and creates nothing.
"""

from flashinfer_ar.allreduce import (
    trtllm_mnnvl_allreduce,
    trtllm_mnnvl_fused_allreduce_add_rmsnorm,
)
from flashinfer_ar.bootstrap import (
    CommBackend,
    InProcessBackend,
    MPIBackend,
    TorchDistBackend,
    run_ranks,
)
from flashinfer_ar.errors import (
    AllReduceTimeoutError,
    BootstrapError,
    CallMismatchError,
    CheckpointError,
    CudaError,
    FlashInferARError,
    JitError,
    SymmetricMemoryError,
)
from flashinfer_ar.fusion import (
    AllReduceFusionPattern,
    QuantizationSFLayout,
    allreduce_fusion,
    create_allreduce_fusion_workspace,
)
from flashinfer_ar.mapping import Mapping
from flashinfer_ar.strategy import MNNVLAllreduceFusionStrategy
from flashinfer_ar.workspace import AllReduceFusionWorkspace, MNNVLAllReduceFusionWorkspace

__version__ = "0.1.0"

__all__ = [
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "AllReduceTimeoutError",
    "BootstrapError",
    "CallMismatchError",
    "CheckpointError",
    "CommBackend",
    "CudaError",
    "FlashInferARError",
    "InProcessBackend",
    "JitError",
    "MNNVLAllReduceFusionWorkspace",
    "MNNVLAllreduceFusionStrategy",
    "MPIBackend",
    "Mapping",
    "QuantizationSFLayout",
    "SymmetricMemoryError",
    "TorchDistBackend",
    "allreduce_fusion",
    "create_allreduce_fusion_workspace",
    "run_ranks",
    "trtllm_mnnvl_allreduce",
    "trtllm_mnnvl_fused_allreduce_add_rmsnorm",
]
