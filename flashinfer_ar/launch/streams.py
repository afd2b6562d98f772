"""Keeps the calls of one workspace in order when they come on several streams."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from flashinfer_ar.driver import checked
from flashinfer_ar.errors import CudaError


class StreamOrder:
    """Makes each call wait for the one before it, whatever streams the two are on.

    Calls of a workspace share its ring: two kernels at once would take each other's slots, and a
    second one may wait for room that the first one holds. Within one stream CUDA orders them; at a
    change of stream, the new one is made to wait for the old one, which must still exist.

    Calls that are captured are ordered among themselves, since they do not run now. Between replays
    and other calls the order is the caller's: nothing here sees a replay.
    """

    def __init__(self) -> None:
        self._eager: int | None = None
        self._captured: int | None = None
        self._event: Any = None

    def enter(self, stream: int) -> None:
        """Called before each launch on ``stream``; the device's context is current.

        Raises ``CudaError`` if the stream of the call before is being captured: then nothing can be
        made to wait for what it ran earlier.
        """
        if _is_capturing(stream):
            if self._captured not in (None, stream) and _is_capturing(self._captured):
                self._make_wait(stream, self._captured)
            self._captured = stream
            return
        if self._eager not in (None, stream):
            self._make_eager_wait(stream)
        self._eager = stream

    def close(self) -> None:
        """Free the event; safe twice."""
        if self._event is not None:
            checked(driver.cuEventDestroy, self._event)
            self._event = None

    def _make_eager_wait(self, stream: int) -> None:
        if _is_capturing(self._eager):
            raise CudaError(
                "the workspace's last call was on a stream that is being captured now: allowed is "
                "a call on that stream, or on another one after the capture"
            )
        self._make_wait(stream, self._eager)

    def _make_wait(self, stream: int, previous: int | None) -> None:
        if self._event is None:
            flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
            self._event = checked(driver.cuEventCreate, flags)
        checked(driver.cuEventRecord, self._event, previous)
        checked(driver.cuStreamWaitEvent, stream, self._event, 0)


def _is_capturing(stream: int | None) -> bool:
    status = checked(driver.cuStreamIsCapturing, stream)
    return bool(status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)
