"""What the CUDA tests share: calls staged on the device, graphs of them.

Ranks are threads that share the device, and a kernel of one waits for the kernels of all. So
between a rank's launches nothing may wait for the device: tensors are made, and torch's own kernels
used once, before the ranks meet at a barrier and launch.
"""

from __future__ import annotations

import contextlib
import ctypes

import pytest
import torch
from harness import random_call

import flashinfer_ar as far

DEVICE = torch.device("cuda", 0)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Staged:
    """One call of one rank: its tensors on the device, and where its outputs go."""

    def __init__(self, call, rank, device):
        self.call = call
        tensors = (call.inputs[rank], call.residual, call.gamma)
        self.tensors = [tensor.to(device, copy=True) for tensor in tensors if tensor is not None]
        num_outputs = 1 if call.residual is None else 2
        self.outputs = [torch.full_like(self.tensors[0], 7.0) for _ in range(num_outputs)]

    def take(self, other):
        """The inputs of another call of this shape."""
        for own, new in zip(self.tensors, other.tensors, strict=True):
            own.copy_(new)

    def keep(self, other):
        """The outputs of another call of this shape."""
        for own, new in zip(self.outputs, other.outputs, strict=True):
            own.copy_(new)

    def results(self):
        """The outputs on the CPU."""
        return tuple(output.cpu() for output in self.outputs)

    def launch(self, workspace):
        call = self.call
        if call.residual is None:
            far.trtllm_mnnvl_allreduce(
                *self.tensors, workspace, call.launch_with_pdl, *self.outputs, call.strategy
            )
        else:
            far.trtllm_mnnvl_fused_allreduce_add_rmsnorm(
                *self.tensors,
                workspace,
                call.epsilon,
                *self.outputs,
                call.launch_with_pdl,
                call.strategy,
            )


def make_calls(world_size, shapes, seed):
    """A call for each ``(num_tokens, hidden, dtype, how)``."""
    return [
        random_call(world_size, num_tokens, hidden, dtype, seed=1000 * seed + i, **how)
        for i, (num_tokens, hidden, dtype, how) in enumerate(shapes)
    ]


def capture(launches, stream=None):
    """A graph of ``launches``, from ``stream`` or torch's own capture stream."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        launches()
    return graph


def in_turn(comm, action):
    """``action()`` on one rank after the other. Nobody else uses the device meanwhile."""
    result = None
    for turn in range(comm.Get_size()):
        comm.barrier()
        if turn == comm.Get_rank():
            result = action()
            torch.cuda.synchronize()
    comm.barrier()
    return result


class OnHost:
    """Stands in for a graph where there are none: the calls themselves."""

    def __init__(self, launches):
        self.replay = launches


def capture_in_turn(comm, device, launches, stream=None):
    """Every rank's graph. Capturing runs nothing, so no rank waits for another one's kernel."""
    if device.type == "cpu":
        return OnHost(launches)
    return in_turn(comm, lambda: capture(launches, stream))


@contextlib.contextmanager
def raw_capture(stream):
    """Capture on a torch stream without torch, which knows nothing of it; the graph is dropped.

    Yields a list that gets the name of the driver's answer to the end of the capture.
    """
    from cuda.bindings import driver

    from flashinfer_ar.driver import checked, current_context, primary_context

    handle, answers = driver.CUstream(stream.cuda_stream), []
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    with current_context(primary_context(DEVICE.index)), torch.cuda.stream(stream):
        checked(driver.cuStreamBeginCapture, handle, mode)
        try:
            yield answers
        finally:
            answer, graph = driver.cuStreamEndCapture(handle)
            answers.append(answer.name)
            if answer == driver.CUresult.CUDA_SUCCESS:
                checked(driver.cuGraphDestroy, graph)


class DeviceFunction:
    """A kernel of a test's own, on torch's current stream."""

    def __init__(self, name, source):
        from cuda.bindings import driver

        from flashinfer_ar.driver import checked, current_context, primary_context
        from flashinfer_ar.jit import nvrtc

        self._driver, self._checked = driver, checked
        self._current, self._context = current_context, primary_context(DEVICE.index)
        target = nvrtc.target_of_device(*torch.cuda.get_device_capability(DEVICE))
        cubin = nvrtc.build_cubin(name, source, target).read_bytes()
        with current_context(self._context):
            module = checked(driver.cuModuleLoadData, cubin)
            self._function = checked(driver.cuModuleGetFunction, module, name.encode())

    def launch(self, num_ctas, num_threads, *arguments):
        """Integers and tensors become 64-bit arguments."""
        values = tuple(
            argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
            for argument in arguments
        )
        types = (ctypes.c_uint64,) * len(values)
        stream = self._driver.CUstream(torch.cuda.current_stream(DEVICE).cuda_stream)
        grid, block = (num_ctas, 1, 1), (num_threads, 1, 1)
        with self._current(self._context):
            self._checked(
                self._driver.cuLaunchKernel,
                *(self._function, *grid, *block, 0, stream, (values, types), 0),
            )
