"""The workspace: one rank's ring and kernels, made and closed together with its peers'."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import torch

from flashinfer_ar import env, plan
from flashinfer_ar.bootstrap import CommBackend, agree_on_value, agreed_step
from flashinfer_ar.calls import Calls, CallShape, PreparedCall, Settings
from flashinfer_ar.checked_call import CheckedCall
from flashinfer_ar.creation import (
    DTYPES,
    device_of,
    ranks_on_device,
    require_arguments,
    require_device,
    supported,
    tensor_parallel_group,
)
from flashinfer_ar.errors import (
    AllReduceTimeoutError,
    BootstrapError,
    CallMismatchError,
    CheckpointError,
)
from flashinfer_ar.jit import Epilogue
from flashinfer_ar.launch import Substrate, substrate_of, target_of
from flashinfer_ar.mapping import Mapping
from flashinfer_ar.strategy import MNNVLAllreduceFusionStrategy as Strategy
from flashinfer_ar.strategy import one_shot_limits, strategy_of

SENTINEL = 0x80000000
NUM_GENERATIONS = 2


class AllReduceFusionWorkspace:
    """Base class, with FlashInfer's names."""

    backend = ""

    def __init__(self, world_size: int, rank: int) -> None:
        self.world_size = world_size
        self.rank = rank

    def destroy(self) -> None:
        """Give back what the workspace holds; collective, safe twice."""
        raise NotImplementedError


class MNNVLAllReduceFusionWorkspace(AllReduceFusionWorkspace):
    """Symmetric memory and kernels of one tensor-parallel group, for messages up to a fixed size.

    Collective: every rank of ``mapping.tp_group`` makes one, with equal arguments. A workspace is
    one sequence of calls, the same on every rank. Kernels of two workspaces may wait for different
    peers, so on a GPU their calls must not overlap: give them one stream, or order their streams
    alike on every rank. A workspace whose call raised
    :class:`~flashinfer_ar.errors.AllReduceTimeoutError` can only be closed.

    Args:
        mapping: this rank's place; the group is its tensor-parallel group of 1 to 72 ranks.
        max_num_tokens: tokens of the largest call that strategy ``AUTO`` has to take.
        hidden_dim: hidden size of that call; it gets kernels compiled for it.
        dtype: dtype of that call: float32, float16 or bfloat16. Other hidden sizes and dtypes run
            too, as long as the message fits.
        buffer_size_in_bytes: bytes of one of the two generations, instead of what that call needs.
        comm_backend: how the ranks meet: the tensor-parallel group itself, or all of
            ``mapping.world_size`` ranks. Default: the world of torch.distributed or of MPI,
            whichever has that size.
        device: where the tensors live. Default: the current CUDA device, without one the CPU.
        force_oneshot_support: make room for one-shot calls of ``max_num_tokens`` too.

    Raises:
        ValueError, TypeError: a wrong argument.
        SymmetricMemoryError, JitError, BootstrapError: the machine or a peer; on all ranks alike.

    Names, argument order and sizing rule are those of FlashInfer's class.
    """

    backend = "mnnvl"

    def __init__(
        self,
        mapping: Mapping,
        max_num_tokens: int | None = None,
        hidden_dim: int | None = None,
        dtype: torch.dtype | None = None,
        buffer_size_in_bytes: int | None = None,
        comm_backend: CommBackend | None = None,
        *,
        device: torch.device | str | None = None,
        force_oneshot_support: bool = False,
    ) -> None:
        require_arguments(mapping, max_num_tokens, hidden_dim, dtype, buffer_size_in_bytes)
        require_device(device)
        super().__init__(mapping.tp_size, mapping.tp_rank)
        self.tp_size = mapping.tp_size
        self._open = False
        self._is_detached = False
        comm = tensor_parallel_group(mapping, comm_backend)
        with contextlib.ExitStack() as undo:
            # What this machine or its environment may refuse is everybody's error.
            with agreed_step(comm, "open the device and read the environment"):
                self.device = device_of(device)
                self._substrate: Substrate = substrate_of(self.device)
                undo.callback(self._substrate.close)
                timeout_s, max_ctas, debug = env.timeout_s(), env.max_ctas(), env.debug()
                limits = one_shot_limits(self._substrate.target, self.world_size)
            self.buffer_size_bytes = plan.whole_packs(
                buffer_size_in_bytes
                or self._bytes_for(
                    max_num_tokens,
                    hidden_dim,
                    dtype,
                    None if force_oneshot_support else limits.largest,
                )
            )
            for name, value in {
                "the device's architecture": self._substrate.target,
                "what the strategy table sends one-shot (FLASHINFER_AR_STRATEGY_TABLE, "
                "flashinfer-ar tune)": limits,
                "the buffer size in bytes": self.buffer_size_bytes,
                "hidden_dim and dtype": (hidden_dim, str(dtype)),
                "FLASHINFER_AR_TIMEOUT_S": timeout_s,
                "FLASHINFER_AR_MAX_CTAS": max_ctas,
                "FLASHINFER_AR_DEBUG": debug,
            }.items():
                agree_on_value(comm, name, value)
            settings = Settings(
                world_size=self.world_size,
                rank=self.rank,
                hidden_size=hidden_dim,
                dtype=None if dtype is None else DTYPES[dtype],
                generation_bytes=self.buffer_size_bytes,
                ranks_on_device=ranks_on_device(comm, self._substrate),
                max_ctas=max_ctas,
                one_shot_limits=limits,
                timeout_ns=int(timeout_s * 1e9),
            )
            self._memory = self._substrate.allocate(comm, self.workspace_size_bytes)
            undo.callback(self._memory.close)
            self._calls = Calls(settings, self._substrate, self._memory)
            # A peer publishes as soon as it may: nobody goes on before every ring is armed.
            with agreed_step(comm, "arm the ring and load the kernels"):
                self._substrate.fill(self._memory.local, self.workspace_size_bytes, SENTINEL)
                self._calls.load_ahead()
            undo.pop_all()
        self._comm = comm
        self._debug = debug
        self._open = True
        self.last_plain: CheckedCall | None = None
        self.last_fused: CheckedCall | None = None

    def _bytes_for(
        self,
        max_num_tokens: int | None,
        hidden_dim: int | None,
        dtype: torch.dtype | None,
        one_shot_max: int | None,
    ) -> int:
        assert max_num_tokens and hidden_dim and dtype  # checked before
        largest = max_num_tokens * hidden_dim * dtype.itemsize
        return plan.generation_bytes_for_all(
            self.world_size, largest, largest if one_shot_max is None else one_shot_max
        )

    # ---- Sizes ------------------------------------------------------------------------------

    @property
    def workspace_size_bytes(self) -> int:
        """Bytes of this rank's ring: both generations."""
        return NUM_GENERATIONS * self.buffer_size_bytes

    @property
    def uc_ptr_local(self) -> int:
        """The address of this rank's ring."""
        return self._memory.local

    @property
    def uc_ptrs(self) -> tuple[int, ...]:
        """The addresses of all ranks' rings, as this process maps them."""
        return self._memory.peers

    @property
    def mc_ptr(self) -> int | None:
        """The multicast address of the rings; ``None`` where stores are unicast."""
        return self._memory.multicast

    @staticmethod
    def get_required_buffer_size_bytes(
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: torch.dtype,
        strategy: Strategy = Strategy.AUTO,
        *,
        device: torch.device | str | None = None,
    ) -> int:
        """Bytes of one generation (``buffer_size_in_bytes``) that a call of this shape needs.

        Fused or not: ``AUTO`` may choose differently, and the larger need is given.
        """
        message_bytes = num_tokens * hidden_dim * dtype.itemsize
        limits = one_shot_limits(target_of(device_of(device)), tp_size)
        kinds = [limits.resolve(strategy, epilogue, message_bytes) for epilogue in Epilogue]
        return max(plan.generation_bytes(kind, tp_size, message_bytes) for kind in kinds)

    def is_buffer_size_sufficient(
        self,
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: torch.dtype,
        use_oneshot: bool | None = None,
        strategy: Strategy = Strategy.AUTO,
    ) -> bool:
        """Whether a call of this shape fits, fused or not.

        ``use_oneshot`` is another way to say ``strategy``.
        """
        shape = CallShape(
            num_tokens=num_tokens,
            hidden_size=hidden_dim,
            dtype=supported(dtype),
            epilogue=Epilogue.NONE,
            strategy=strategy if use_oneshot is None else strategy_of(use_oneshot),
        )
        return tp_size == self.world_size and all(
            self._calls.slots_sufficient(dataclasses.replace(shape, epilogue=epilogue))
            for epilogue in Epilogue
        )

    # ---- Calls and end ----------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the workspace takes calls."""
        return self._open

    def prepare(self, shape: CallShape) -> PreparedCall | None:
        """The launch for a checked shape; ``None`` for zero tokens, which launch nothing anywhere.

        Raises ``ValueError`` if the call does not fit, ``CheckpointError`` between prepare and
        restore, and with ``FLASHINFER_AR_DEBUG=1`` ``CallMismatchError`` if ranks' calls differ.
        """
        if self._is_detached:
            raise CheckpointError("the workspace has no memory before checkpoint_restore")
        if self._debug:
            agree_on_value(self._comm, "the call", shape, CallMismatchError)
        return self._calls.prepare(shape) if shape.num_tokens else None

    def remember(
        self,
        call: PreparedCall,
        tensors: Sequence[torch.Tensor],
        numbers: tuple[float | None, float] = (None, 0.0),
    ) -> None:
        """Take calls like this one, which passed every check, without asking :meth:`prepare`.

        Never in debug mode, and only until the workspace gives its memory back or is closed.
        """
        plain = call.shape.epilogue is Epilogue.NONE
        last = self.last_plain if plain else self.last_fused
        if self._debug or (last is not None and last.add(call, tensors, numbers)):
            return
        if plain:
            self.last_plain = CheckedCall(call, tensors, numbers)
        else:
            self.last_fused = CheckedCall(call, tensors, numbers)

    def _forget(self) -> None:
        self.last_plain = self.last_fused = None

    def synchronize(self) -> None:
        """Return when all calls have ended; ``AllReduceTimeoutError`` if one ran out of time."""
        if self._open:
            self._substrate.synchronize()
            self._calls.raise_on_timeout()

    def checkpoint_prepare(self) -> None:
        """Give the ring's physical memory back and keep its addresses; collective, safe twice.

        Waits for all calls. Until :meth:`checkpoint_restore`, calls raise ``CheckpointError`` and
        captured graphs must not be replayed.
        """
        if self._is_detached or not self._open:
            return
        self._forget()
        with agreed_step(self._comm, "end all calls"):
            self.synchronize()
        with agreed_step(self._comm, "release the ring"):
            self._memory.unmap()
        self._is_detached = True

    def checkpoint_restore(self, comm_backend: CommBackend | None = None) -> None:
        """Put new memory behind the ring's addresses; collective. Captured graphs are right again.

        ``comm_backend``: the group, if the one that made the workspace is gone; the same ranks in
        the same order.
        """
        if not self._is_detached or not self._open:
            return
        comm = comm_backend or self._comm
        if (comm.Get_rank(), comm.Get_size()) != (self.rank, self.world_size):
            raise ValueError(
                f"comm_backend: rank {comm.Get_rank()} of {comm.Get_size()}; allowed is rank "
                f"{self.rank} of {self.world_size}, as at creation"
            )
        self._memory.map(comm)
        with contextlib.ExitStack() as undo:
            undo.callback(self._memory.unmap)
            with agreed_step(comm, "arm the ring"):
                self._substrate.fill(self._memory.local, self.workspace_size_bytes, SENTINEL)
            undo.pop_all()
        self._comm = comm
        self._is_detached = False

    def close(self) -> None:
        """Free the ring; safe twice. For every rank, before its process ends.

        Waits for this rank's calls and for no peer; with multicast for all ranks, whose stores
        would miss this rank's memory once it is unbound, or for the deadline if one is lost.
        Raises ``AllReduceTimeoutError`` if a call ran out of time and no other method has said so
        yet; everything is freed all the same.
        """
        if not self._open:
            return
        self._open = False
        self._forget()
        with contextlib.ExitStack() as resources:
            resources.callback(self._substrate.close)
            resources.callback(self._memory.close)
            self._substrate.synchronize()
            if self._memory.multicast is not None:
                with contextlib.suppress(BootstrapError):
                    self._comm.barrier()
            if not self._calls.timeout_was_raised:
                self._calls.raise_on_timeout()

    def destroy(self) -> None:
        """FlashInfer's name for :meth:`close`."""
        self.close()

    def __enter__(self) -> MNNVLAllReduceFusionWorkspace:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        # An error on its way out is the one to report, not the timeout that it may have caused.
        with contextlib.suppress(*([AllReduceTimeoutError] if exc_type else [])):
            self.close()
