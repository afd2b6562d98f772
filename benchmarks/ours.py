"""flashinfer_ar as a contender: workspaces as users make them, or one rank alone for the feeder."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from cuda.bindings import driver

import flashinfer_ar as far
from benchmarks.contender import Copy, Feed, Room, Shape, Tensors
from benchmarks.device_code import DeviceCode
from benchmarks.edited_headers import edited_headers
from benchmarks.results import EMPTY, OURS
from flashinfer_ar import plan
from flashinfer_ar.calls import Calls, CallShape, PreparedCall, Settings
from flashinfer_ar.jit import DType, Epilogue, KernelKind
from flashinfer_ar.launch import substrate_of
from flashinfer_ar.strategy import MNNVLAllreduceFusionStrategy as Strategy
from flashinfer_ar.strategy import one_shot_limits

EPSILON = 1e-5
_PACK, _STRIPE = 16, 512  # bytes

_HEADER = "platform_cuda.cuh"
_MULTICAST_STORE = 'asm volatile("multimem.st.relaxed.sys.global.v4.f32 '
_ORDINARY_STORE = 'asm volatile("st.relaxed.sys.global.v4.f32 '


def _strategy(shape: Shape) -> Strategy:
    return Strategy.TWOSHOT if shape.two_shot else Strategy.ONESHOT


def _call_shape(shape: Shape) -> CallShape:
    epilogue = Epilogue.ADD_RMS_NORM if shape.fused else Epilogue.NONE
    return CallShape(shape.num_tokens, shape.hidden, DType.BFLOAT16, epilogue, _strategy(shape))


def _generation_bytes(world_size: int, hidden: int, max_tokens: int, one_shot_tokens: int) -> int:
    tokens = {KernelKind.ONESHOT: one_shot_tokens, KernelKind.TWOSHOT: max_tokens}
    return max(
        plan.generation_bytes(kind, world_size, most * hidden * 2) for kind, most in tokens.items()
    )


class OursVirtual:
    """All ranks on one device, unicast, through the public API."""

    name = OURS
    tolerance = 0.0

    def __init__(self, world_size: int, hidden: int, max_tokens: int, one_shot_tokens: int) -> None:
        size = _generation_bytes(world_size, hidden, max_tokens, one_shot_tokens)

        def make(comm: Any) -> far.MNNVLAllReduceFusionWorkspace:
            return far.MNNVLAllReduceFusionWorkspace(
                far.Mapping(world_size, comm.Get_rank(), tp_size=world_size),
                None,
                hidden,
                torch.bfloat16,
                buffer_size_in_bytes=size,
                comm_backend=comm,
                device=torch.device("cuda", torch.cuda.current_device()),
            )

        self._workspaces = far.run_ranks(world_size, make, timeout_s=300)

    def refusal(self, shape: Shape) -> str | None:
        del shape
        return None

    def room(self, shape: Shape) -> Room:
        # Any shape fits: a workspace refuses, when it is made, a device too small for its grids.
        del shape
        return Room(ctas=1, held=self._workspaces[0].world_size)

    def launch(self, shape: Shape, rank: int, tensors: Tensors, stream: int) -> None:
        del stream  # the current one
        workspace, strategy = self._workspaces[rank], _strategy(shape)
        if not shape.fused:
            far.trtllm_mnnvl_allreduce(tensors.input, workspace, True, tensors.output, strategy)
            return
        far.trtllm_mnnvl_fused_allreduce_add_rmsnorm(
            tensors.input,
            tensors.residual_in,
            tensors.gamma,
            workspace,
            EPSILON,
            tensors.output,
            tensors.residual_out,
            True,
            strategy,
        )

    def prepared(self, shape: Shape) -> PreparedCall:
        """Rank 0's call."""
        call = self._workspaces[0].prepare(_call_shape(shape))
        assert call is not None  # there is a token
        return call

    def close(self) -> None:
        for workspace in self._workspaces:
            workspace.close()


class _OwnMemory:
    """Rank 0's ring, its own multicast address too; its peers' are one block nobody reads."""

    def __init__(self, world_size: int, size_bytes: int, multicast: bool) -> None:
        ring, sink = (
            torch.full((size_bytes // 4,), -(2**31), dtype=torch.int32, device="cuda")
            for _ in range(2)
        )
        self._keep = ring, sink
        self.size_bytes = size_bytes
        self.local = ring.data_ptr()
        self.peers = (self.local, *[sink.data_ptr()] * (world_size - 1))
        self.multicast = self.local if multicast else None


class OursFed:
    """Rank 0 alone. In place of a multicast store, one ordinary store to its own ring.

    That one instruction is replaced in a copy of the headers, since a multicast address needs
    several devices; ``multicast=False`` has the unicast stores instead, unedited.
    """

    name = OURS
    tolerance = 0.0

    def __init__(
        self,
        world_size: int,
        hidden: int,
        max_tokens: int,
        one_shot_tokens: int,
        *,
        multicast: bool = True,
    ) -> None:
        self._substrate = substrate_of(torch.device("cuda", torch.cuda.current_device()))
        self._generation_bytes = _generation_bytes(world_size, hidden, max_tokens, one_shot_tokens)
        self._memory = _OwnMemory(world_size, 2 * self._generation_bytes, multicast)
        settings = Settings(
            world_size=world_size,
            rank=0,
            hidden_size=hidden,
            dtype=DType.BFLOAT16,
            generation_bytes=self._generation_bytes,
            ranks_on_device=1,
            max_ctas=None,
            one_shot_limits=one_shot_limits(self._substrate.target, world_size),
            timeout_ns=2_000_000_000,
        )
        self._calls = Calls(settings, self._substrate, self._memory)
        self._prepared: dict[Shape, PreparedCall] = {}

    def refusal(self, shape: Shape) -> str | None:
        del shape
        return None

    def room(self, shape: Shape) -> Room:
        del shape
        return Room(ctas=1, held=1)

    def prepared(self, shape: Shape) -> PreparedCall:
        """The call, whose kernel is built from the edited headers at first use."""
        if shape not in self._prepared:
            replaced = edited_headers(_HEADER, _MULTICAST_STORE, _ORDINARY_STORE)
            with replaced if self._memory.multicast else contextlib.nullcontext():
                self._prepared[shape] = self._calls.prepare(_call_shape(shape))
        return self._prepared[shape]

    def launch(self, shape: Shape, rank: int, tensors: Tensors, stream: int) -> None:
        del rank, stream
        call = self.prepared(shape)
        addresses = tensors.input.data_ptr(), tensors.output.data_ptr()
        if shape.fused:
            more = tensors.residual_in, tensors.residual_out, tensors.gamma
            call.set_numbers(EPSILON, 0.0)
            call.place(*addresses, *(tensor.data_ptr() for tensor in more))
        else:
            call.place(*addresses)
        call.start(True)

    def feed(self, shape: Shape, inputs: Sequence[int], total: int) -> Feed:
        world_size, size = shape.world_size, shape.message_bytes
        if shape.two_shot:
            copies = _two_shot_copies(world_size, size, inputs, total)
        else:  # token by token where tokens matter, else source by source: oneshot.cuh
            row = shape.hidden * 2 if shape.fused else size
            copies = [
                Copy(inputs[source], row, source * row, world_size * row, row, size // row)
                for source in range(1, world_size)
            ]
        return Feed(
            base=self._memory.local,
            generation_word=self._substrate.control,
            shift=16,
            num_generations=2,
            generation_bytes=self._generation_bytes,
            copies=copies,
        )

    def close(self) -> None:
        self._substrate.close()


class EmptyKernel:
    """What any kernel costs that is launched like ours: the same grid and attributes, no work."""

    name = EMPTY
    tolerance = math.inf

    def __init__(self, ours: OursVirtual | OursFed, code: DeviceCode) -> None:
        self._ours, self._code = ours, code

    def refusal(self, shape: Shape) -> str | None:
        del shape
        return None

    def room(self, shape: Shape) -> Room:
        return self._ours.room(shape)

    def launch(self, shape: Shape, rank: int, tensors: Tensors, stream: int) -> None:
        del rank, tensors
        launch: Any = self._ours.prepared(shape).launch
        config = launch.configs[1]
        cluster = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        sizes = [each.value.clusterDim.x for each in config.attrs if each.id == cluster]
        self._code.launch_empty(stream, config.gridDimX, config.blockDimX, max(sizes, default=1))

    def feed(self, shape: Shape, inputs: Sequence[int], total: int) -> Feed:
        """Nothing: the feeder finds no copy to make."""
        del shape, total
        return Feed(
            base=0, generation_word=inputs[0], shift=0, num_generations=1, generation_bytes=0
        )

    def close(self) -> None:
        pass


def _two_shot_copies(world_size: int, size: int, inputs: Sequence[int], total: int) -> list[Copy]:
    """Contributions to rank 0's stripes, and the other owners' sums."""
    stripes = -(-size // _STRIPE)
    share_bytes = -(-stripes // world_size) * _STRIPE
    results = world_size * share_bytes
    copies = []
    for rank in range(1, world_size):
        scattered = rank * _STRIPE, world_size * _STRIPE
        copies += _striped(inputs[rank], 0, world_size, size, *scattered)
        first = results + rank * _STRIPE
        copies += _striped(total, rank, world_size, size, first, world_size * _STRIPE)
    return copies


def _striped(
    source: int, owner: int, world_size: int, size: int, offset: int, pitch: int
) -> list[Copy]:
    """The stripes of one owner; the tensor's last one may be shorter."""
    period = world_size * _STRIPE
    start = owner * _STRIPE
    whole = max((size - start - _STRIPE) // period + 1, 0)
    copies = [Copy(source + start, period, offset, pitch, _STRIPE, whole)] if whole else []
    rest = size - start - whole * period
    if 0 < rest < _STRIPE:
        tail = source + start + whole * period
        copies.append(Copy(tail, period, offset + whole * pitch, pitch, rest, 1))
    return copies
