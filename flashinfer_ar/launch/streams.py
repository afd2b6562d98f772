"""Keeps the calls of one workspace in order when they come on several streams."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from flashinfer_ar.driver import checked


class StreamOrder:
    """Makes each call wait for the one before it, whatever streams the two are on.

    Calls of a workspace share its ring: two kernels at once would take each other's slots, and a
    second one may wait for room that the first one holds. Within one stream CUDA orders them; at a
    change of stream, the new one is made to wait for the old one, which must still exist.

    A graph's order is set when it is captured, and between replays and other calls it is the
    caller's: nothing here sees a replay.
    """

    def __init__(self) -> None:
        self._last: int | None = None
        self._event: Any = None

    def enter(self, stream: int) -> None:
        """Called before each launch on ``stream``; the device's context is current."""
        if self._last is not None and stream != self._last:
            self._make_wait(stream, self._last)
        self._last = stream

    def _make_wait(self, stream: int, previous: int) -> None:
        # Between a stream that is being captured and one that is not there is no order to make:
        # what is captured does not run now.
        if _is_capturing(stream) != _is_capturing(previous):
            return
        if self._event is None:
            flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
            self._event = checked(driver.cuEventCreate, flags)
        checked(driver.cuEventRecord, self._event, previous)
        checked(driver.cuStreamWaitEvent, stream, self._event, 0)


def _is_capturing(stream: int) -> bool:
    status = checked(driver.cuStreamIsCapturing, stream)
    return bool(status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)
