"""Tensor parallelism: the one collective that a layer's forward pass needs, twice."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator

import torch

import flashinfer_ar as far


class FusedAllReduce:
    """A rank's end of ``sum over ranks -> add residual -> RMSNorm``, one kernel a call.

    Every rank must construct it, call it and close it in the same order (collective). It also
    times its calls, because how long they take is the question that this example answers.
    """

    def __init__(
        self,
        comm: far.CommBackend,
        *,
        max_num_tokens: int,
        hidden_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        epsilon: float,
    ) -> None:
        self.rank, self.world_size = comm.Get_rank(), comm.Get_size()
        self.max_num_tokens = max_num_tokens
        self._epsilon = epsilon
        self._timer: HostTimer | StreamTimer = (
            StreamTimer() if device.type == "cuda" else HostTimer()
        )
        self._tokens_of_calls: list[int] = []
        # One workspace for the life of the model: its buffers are as large as the largest step,
        # and all kernels are loaded here, before any peer can be waiting inside one.
        self._workspace = far.MNNVLAllReduceFusionWorkspace(
            far.Mapping(world_size=self.world_size, rank=self.rank, tp_size=self.world_size),
            max_num_tokens=max_num_tokens,
            hidden_dim=hidden_dim,
            dtype=dtype,
            comm_backend=comm,
            device=device,
        )

    def __call__(
        self, partial: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm, new residual)`` for this rank's ``partial`` sum, all ``[tokens, hidden]``.

        The residual stream is the same on every rank, bit for bit, before and after.
        """
        with self._timer.call():
            norm, residual = far.trtllm_mnnvl_fused_allreduce_add_rmsnorm(
                partial, residual, gamma, self._workspace, epsilon=self._epsilon
            )
        self._tokens_of_calls.append(partial.shape[0])
        return norm, residual

    def close(self) -> None:
        """Release the workspace; collective."""
        self._workspace.destroy()

    @property
    def num_calls(self) -> int:
        """How many fused calls this rank has made."""
        return len(self._tokens_of_calls)

    def median_us(self) -> float:
        """Median microseconds of a call in decode (one token), waiting for slower peers included.

        Prefill calls stand in when no step was a decode step, that is, after one new token.
        """
        calls = list(zip(self._tokens_of_calls, self._timer.microseconds(), strict=True))
        decode = [us for num_tokens, us in calls if num_tokens == 1]
        return statistics.median(decode or [us for _, us in calls])


class HostTimer:
    """Times calls that are finished when they return, as they are on CPU tensors."""

    def __init__(self) -> None:
        self._us: list[float] = []

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Time what is done inside."""
        start = time.perf_counter()
        yield
        self._us.append((time.perf_counter() - start) * 1e6)

    def microseconds(self) -> list[float]:
        """The times of all calls so far."""
        return self._us


class StreamTimer:
    """Times calls that only enqueue work: what passes between two marks in the CUDA stream."""

    def __init__(self) -> None:
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Time what is enqueued inside, on the current stream."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        stop.record()
        self._marks.append((start, stop))

    def microseconds(self) -> list[float]:
        """The times of all calls so far; waits for the last one to end."""
        if self._marks:
            self._marks[-1][1].synchronize()
        return [start.elapsed_time(stop) * 1e3 for start, stop in self._marks]
