"""What a launch asks of the driver, in which order and in whose context; the driver is a fake.

tests/test_cuda.py and tests/test_cuda_graphs.py have the same on a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cuda.bindings import driver

from flashinfer_ar.errors import CudaError
from flashinfer_ar.jit.params import params_type
from flashinfer_ar.launch.cuda import CudaKernel, CudaLaunch
from flashinfer_ar.launch.streams import StreamOrder

CONTEXT, OTHER_CONTEXT = 7, 8
S, T, U = 100, 200, 300  # streams; 0 is the default one
OK = driver.CUresult.CUDA_SUCCESS
STATUS = driver.CUstreamCaptureStatus


class Gpu:
    """The driver's and torch's state, and what was asked of the driver."""

    def __init__(self):
        self.contexts = [CONTEXT]
        self.stream = S
        self.capturing = set()
        self.fails = False
        self.asked = []

    def launch(self, config, function, arguments, extra):
        if self.contexts[-1] != CONTEXT:
            return (driver.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if self.fails:
            return (driver.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,)
        self.asked.append(("launch", int(config.hStream), config.numAttrs))
        return (OK,)

    def push(self, context):
        self.contexts.append(context)
        return (OK,)

    def pop(self):
        return OK, self.contexts.pop()

    def is_capturing(self, stream):
        captured = STATUS.CU_STREAM_CAPTURE_STATUS_ACTIVE
        return OK, captured if stream in self.capturing else STATUS.CU_STREAM_CAPTURE_STATUS_NONE

    def record(self, event, stream):
        assert self.contexts[-1] == CONTEXT
        self.asked.append(("record", stream))
        return (OK,)

    def wait(self, stream, event, flags):
        assert self.contexts[-1] == CONTEXT
        self.asked.append(("wait", stream))
        return (OK,)


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    fakes = {
        "cuLaunchKernelEx": gpu.launch,
        "cuCtxPushCurrent": gpu.push,
        "cuCtxPopCurrent": gpu.pop,
        "cuStreamIsCapturing": gpu.is_capturing,
        "cuEventCreate": lambda flags: (OK, 1),
        "cuEventDestroy": lambda event: (OK,),
        "cuEventRecord": gpu.record,
        "cuStreamWaitEvent": gpu.wait,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(driver, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: gpu.stream, raising=False)
    return gpu


@pytest.fixture
def order():
    return StreamOrder()


def launch_of(order, may_start_early=True):
    kernel = object.__new__(CudaKernel)
    kernel.function, kernel.device_index, kernel.context, kernel.order = 1, 0, CONTEXT, order
    kernel._cluster = 1
    kernel._spec = SimpleNamespace(geometry=SimpleNamespace(threads=128), shared_bytes=0)
    return CudaLaunch(kernel, params_type(2)(), 4, may_start_early)


def asked(gpu):
    found, gpu.asked = gpu.asked, []
    return found


def test_on_the_same_stream_only_the_launch(gpu, order, monkeypatch):
    launch = launch_of(order)
    launch.start(False)
    assert asked(gpu) == [("launch", S, 0)]
    for name in ("cuCtxPushCurrent", "cuStreamIsCapturing", "cuEventRecord"):
        monkeypatch.setattr(driver, name, None)
    launch.start(False)
    assert asked(gpu) == [("launch", S, 0)]


def test_both_ways_of_launching_follow_the_stream(gpu, order):
    launch = launch_of(order)
    for stream in (S, T, S, 0, T):
        gpu.stream = stream
        for with_pdl in (True, False, True):
            launch.start(with_pdl)
        launches = [each for each in asked(gpu) if each[0] == "launch"]
        assert launches == [("launch", stream, with_pdl) for with_pdl in (1, 0, 1)]


def test_no_pdl_where_a_grid_must_not_start_early(gpu, order):
    launch_of(order, may_start_early=False).start(True)
    assert asked(gpu) == [("launch", S, 0)]


def test_another_stream_waits_for_the_one_before(gpu, order):
    first, second = launch_of(order), launch_of(order)
    first.start(False)
    gpu.stream = T
    second.start(False)
    assert asked(gpu) == [("launch", S, 0), ("record", S), ("wait", T), ("launch", T, 0)]
    second.start(False)
    gpu.stream = S
    first.start(False)
    assert asked(gpu) == [("launch", T, 0), ("record", T), ("wait", S), ("launch", S, 0)]


@pytest.mark.parametrize("settled", [False, True])
def test_another_context_is_left_as_it_was(gpu, order, settled):
    launch = launch_of(order)
    if settled:
        launch.start(False)
        asked(gpu)
    gpu.contexts.append(OTHER_CONTEXT)
    launch.start(False)
    assert asked(gpu) == [("launch", S, 0)]
    assert gpu.contexts == [CONTEXT, OTHER_CONTEXT]


@pytest.mark.parametrize("settled", [False, True])
def test_a_refused_launch_raises(gpu, order, settled):
    launch = launch_of(order)
    if settled:
        launch.start(False)
        asked(gpu)
    gpu.fails = True
    with pytest.raises(CudaError, match="LAUNCH_OUT_OF_RESOURCES"):
        launch.start(False)
    assert asked(gpu) == []
    assert gpu.contexts == [CONTEXT]


def test_captured_calls_are_ordered_among_themselves(gpu, order):
    """Also if the first of them is on the stream of the eager calls, which asks nothing."""
    launch = launch_of(order)
    launch.start(False)
    gpu.capturing = {S, T}
    for stream in (S, T, T, S):
        gpu.stream = stream
        launch.start(False)
    assert asked(gpu) == [
        *[("launch", S, 0)] * 2,
        *[("record", S), ("wait", T), ("launch", T, 0), ("launch", T, 0)],
        *[("record", T), ("wait", S), ("launch", S, 0)],
    ]


def test_a_capture_elsewhere_does_not_break_the_order_of_eager_calls(gpu, order):
    launch = launch_of(order)
    launch.start(False)
    gpu.capturing, gpu.stream = {T}, T
    launch.start(False)
    gpu.capturing = set()
    assert asked(gpu) == [("launch", S, 0), ("launch", T, 0)]
    gpu.stream = U
    launch.start(False)
    assert asked(gpu) == [("record", S), ("wait", U), ("launch", U, 0)]


def test_an_eager_call_cannot_wait_for_a_stream_under_capture(gpu, order):
    launch = launch_of(order)
    launch.start(False)
    gpu.capturing, gpu.stream = {S}, T
    with pytest.raises(CudaError, match="being captured"):
        launch.start(False)
    gpu.stream = S
    launch.start(False)  # part of the capture
    assert asked(gpu) == [("launch", S, 0)] * 2
