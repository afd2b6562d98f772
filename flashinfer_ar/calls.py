"""A rank's calls: from a shape to a kernel, a grid and a parameter block, and the launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from flashinfer_ar import jit, plan
from flashinfer_ar.errors import AllReduceTimeoutError, CudaError
from flashinfer_ar.instances import Instances
from flashinfer_ar.jit import DType, Epilogue, KernelKind, KernelSpec
from flashinfer_ar.jit.params import Params, TimeoutRecord, params_type
from flashinfer_ar.jit.spec import PACK_BYTES
from flashinfer_ar.launch import LoadedKernel, PreparedLaunch, Substrate
from flashinfer_ar.memory import SymmetricMemory
from flashinfer_ar.strategy import MNNVLAllreduceFusionStrategy, OneShotLimits


@dataclass(frozen=True)
class Settings:
    """What is fixed when a workspace is made; equal on all ranks but for ``rank``."""

    world_size: int
    rank: int
    hidden_size: int | None  # these two get kernels of their own
    dtype: DType | None
    generation_bytes: int
    ranks_on_device: int
    max_ctas: int | None  # FLASHINFER_AR_MAX_CTAS
    one_shot_limits: OneShotLimits
    timeout_ns: int


@dataclass(frozen=True)
class CallShape:
    """What decides how a call runs."""

    num_tokens: int
    hidden_size: int
    dtype: DType
    epilogue: Epilogue
    strategy: MNNVLAllreduceFusionStrategy

    @property
    def message_bytes(self) -> int:
        """Bytes of one rank's input."""
        return self.num_tokens * self.hidden_size * self.dtype.itemsize

    @property
    def hidden_packs(self) -> int:
        """Packs of a token."""
        return self.hidden_size // self.dtype.per_pack


class PreparedCall:
    """A launch of which only the tensors' addresses and two numbers change from call to call.

    ``params`` holds them; ``enqueue`` is :meth:`start` for who has seen ``record.state`` at zero.
    """

    def __init__(
        self,
        shape: CallShape,
        kind: KernelKind,
        params: Params,
        launch: PreparedLaunch,
        record: TimeoutRecord,
        raise_on_timeout: Callable[[], None],
    ) -> None:
        self.shape = shape
        self.kind = kind
        self.launch = launch
        self.params = params
        self.record = record
        self._raise_on_timeout = raise_on_timeout
        self.enqueue = self.start if launch.ends_at_once else launch.start

    def place(
        self, input: int, output: int, residual_in: int = 0, residual_out: int = 0, gamma: int = 0
    ) -> None:
        """Set the addresses of the next call's tensors."""
        params = self.params
        params.input, params.output = input, output
        params.residual_in, params.residual_out, params.gamma = residual_in, residual_out, gamma

    def set_numbers(self, epsilon: float, weight_bias: float) -> None:
        """Set the numbers of this and the next fused calls."""
        self.params.epsilon = epsilon
        self.params.weight_bias = weight_bias

    def start(self, launch_with_pdl: bool) -> None:
        """Start the kernel on the current stream; on the host, run it to its end.

        Raises ``AllReduceTimeoutError`` if this call, or on a GPU an earlier one, ran out of time.
        """
        if self.record.state:  # a call before: the ring holds half of it, and nothing may follow
            self._raise_on_timeout()
        self.launch.start(launch_with_pdl)
        if self.launch.ends_at_once and self.record.state:  # this call
            self._raise_on_timeout()


class Calls:
    """Kernels and prepared calls of one rank. Not for several threads at once."""

    def __init__(self, settings: Settings, substrate: Substrate, memory: SymmetricMemory) -> None:
        self._settings = settings
        self._substrate = substrate
        self._memory = memory
        self._instances = Instances(
            target=substrate.target,
            world_size=settings.world_size,
            rank=settings.rank if substrate.compiles_rank else None,
            hidden_size=settings.hidden_size,
            dtype=settings.dtype,
            multicast=memory.multicast is not None,
        )
        self._kernels: dict[KernelSpec, LoadedKernel] = {}
        self._by_shape: dict[CallShape, PreparedCall] = {}
        self._by_number: list[PreparedCall] = []
        self.timeout_was_raised = False

    def load_ahead(self) -> None:
        """Load every kernel whose first use could wait behind a spinning peer on the same device.

        On a GPU, loading a module waits for running kernels, and one of those may wait for the rank
        that wants to load. The host has no such wait and builds kernels at their first use.
        """
        if self._substrate.compiles_rank:
            specs = list(self._instances.ahead())
            for spec, binary in zip(specs, jit.build_all(specs), strict=True):
                kernel = self._kernels[spec] = self._substrate.load(spec, binary)
                self._require_residency(spec, kernel)

    def prepare(self, shape: CallShape) -> PreparedCall:
        """The launch for ``shape``; ``ValueError`` if it does not fit the workspace."""
        call = self._by_shape.get(shape)
        if call is None:
            call = self._by_shape[shape] = self._prepare(shape)
            self._by_number.append(call)
        return call

    def raise_on_timeout(self) -> None:
        """Raise ``AllReduceTimeoutError`` if a kernel has recorded a timeout by now."""
        record = self._substrate.timeout_record
        if record.state == 0:
            return
        self.timeout_was_raised = True
        call = self._by_number[record.call]
        raise AllReduceTimeoutError(
            f"rank {record.rank} waited {self._settings.timeout_ns / 1e9:g} s "
            f"(FLASHINFER_AR_TIMEOUT_S) for data of rank {record.peer}: kernel {call.kind.value} "
            f"({call.shape.epilogue.value}), token {record.pack // call.shape.hidden_packs} of "
            f"[{call.shape.num_tokens}, {call.shape.hidden_size}] {call.shape.dtype.value}, "
            f"epoch {record.epoch}. The workspace can only be closed"
        )

    def slots_sufficient(self, shape: CallShape) -> bool:
        """Whether the ring holds a call of this shape."""
        return self._needed_bytes(shape) <= self._settings.generation_bytes

    # ---- From a shape to a launch -----------------------------------------------------------

    def _kind(self, shape: CallShape) -> KernelKind:
        limits = self._settings.one_shot_limits
        return limits.resolve(shape.strategy, shape.epilogue, shape.message_bytes)

    def _needed_bytes(self, shape: CallShape) -> int:
        return plan.generation_bytes(
            self._kind(shape), self._settings.world_size, shape.message_bytes
        )

    def _prepare(self, shape: CallShape) -> PreparedCall:
        self._require_capacity(shape)
        kind = self._kind(shape)
        spec = self._instances.of_call(
            kind,
            shape.dtype,
            shape.epilogue,
            shape.hidden_size,
            shape.num_tokens * self._settings.ranks_on_device,
        )
        rows = plan.num_rows(spec.geometry, shape.epilogue, shape.num_tokens, shape.hidden_packs)
        num_clusters = min(rows, self._max_clusters(spec))
        num_ctas = num_clusters * spec.geometry.cluster
        params = self._params(shape)
        launched = spec.target, spec.geometry, self._settings.ranks_on_device, num_clusters
        params.release_early = plan.releases_early(*launched)
        launch = self._load(spec).prepare(params, num_ctas, plan.may_start_early(*launched))
        record = self._substrate.timeout_record
        return PreparedCall(shape, kind, params, launch, record, self.raise_on_timeout)

    def _max_clusters(self, spec: KernelSpec) -> int:
        own = self._settings
        return plan.max_clusters(spec.target, spec.geometry, own.ranks_on_device, own.max_ctas)

    def _require_residency(self, spec: KernelSpec, kernel: LoadedKernel) -> None:
        """Refuse a device that cannot hold the largest grids: some CTAs would never start."""
        needed = self._max_clusters(spec) * self._settings.ranks_on_device
        held = kernel.max_resident_clusters()
        if needed > held:
            raise CudaError(
                f"{spec.name} needs {needed} clusters of {spec.geometry.cluster} CTAs at once on "
                f"this device (ranks on it: {self._settings.ranks_on_device}), which holds {held} "
                f"(a MIG slice or green context holds fewer than the whole device). Set "
                f"FLASHINFER_AR_MAX_CTAS, the CTAs of one rank, to a lower number on all ranks"
            )

    def _require_capacity(self, shape: CallShape) -> None:
        shown = f"input: [{shape.num_tokens}, {shape.hidden_size}] {shape.dtype.value}"
        if not self.slots_sufficient(shape):
            raise ValueError(
                f"{shown} needs {self._needed_bytes(shape)} bytes of workspace with strategy "
                f"{self._kind(shape).name}; allowed is buffer_size_bytes="
                f"{self._settings.generation_bytes}"
            )
        limit = plan.max_hidden_size(shape.dtype)
        if shape.epilogue is Epilogue.ADD_RMS_NORM and shape.hidden_size > limit:
            raise ValueError(f"{shown}: allowed with RMSNorm is a hidden size up to {limit}")

    def _params(self, shape: CallShape) -> Params:
        params = params_type(self._settings.world_size)()
        params.rings[:] = list(self._memory.peers)
        params.multicast = self._memory.multicast or 0
        params.control = self._substrate.control
        params.timeout_record = ctypes.addressof(self._substrate.timeout_record)
        params.timeout_ns = self._settings.timeout_ns
        params.generation_packs = self._settings.generation_bytes // PACK_BYTES
        params.num_tokens = shape.num_tokens
        params.hidden_packs = shape.hidden_packs
        params.rank = self._settings.rank
        params.call = len(self._by_number)
        return params

    def _load(self, spec: KernelSpec) -> LoadedKernel:
        kernel = self._kernels.get(spec)
        if kernel is None:
            kernel = self._kernels[spec] = self._substrate.load(spec, jit.build(spec))
        return kernel
