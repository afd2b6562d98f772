"""Keeps the calls of one workspace in order when they come on several streams."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from flashinfer_ar.driver import checked
from flashinfer_ar.errors import CudaError

_NOT_CAPTURING = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE


class StreamOrder:
    """Makes each call wait for the one before it, whatever streams the two are on.

    Calls of a workspace share its ring: two kernels at once would take each other's slots, and a
    second one may wait for room that the first one holds. Within one stream CUDA orders them; at a
    change of stream, the new one is made to wait for the old one, which must still exist.

    Calls that are captured are ordered among themselves, since they do not run now. Between replays
    and other calls the order is the caller's: nothing here sees a replay.
    """

    def __init__(self) -> None:
        # The stream of the last call if no call was captured since: the next one needs no `enter`
        # there. Not even if the stream is being captured by then: within it, order is CUDA's.
        self.settled: int | None = None
        self._eager: int | None = None
        self._captured: int | None = None
        self._event: Any = None

    def enter(self, stream: int) -> None:
        """Called before a launch on any stream but ``settled``; the device's context is current.

        Raises ``CudaError`` if the stream of the call before is being captured: then nothing can be
        made to wait for what it ran earlier.
        """
        if _is_capturing(stream):
            self._enter_captured(stream)
            self.settled = None
        else:
            if stream != self._eager:
                self._enter_eager(stream)
            self.settled = stream

    def close(self) -> None:
        """Free the event; safe twice."""
        if self._event is not None:
            checked(driver.cuEventDestroy, self._event)
            self._event = None

    def _enter_captured(self, stream: int) -> None:
        previous = self._captured
        if self.settled is not None and _is_capturing(self.settled):
            previous = self.settled  # captured calls went there without saying so
        if previous is not None and previous != stream and _is_capturing(previous):
            self._make_wait(stream, previous)
        self._captured = stream

    def _enter_eager(self, stream: int) -> None:
        if self._eager is not None:
            if _is_capturing(self._eager):
                raise CudaError(
                    "the workspace's last call was on a stream that is being captured now: allowed "
                    "is a call on that stream, or on another one after the capture"
                )
            self._make_wait(stream, self._eager)
        self._eager = stream

    def _make_wait(self, stream: int, previous: int) -> None:
        if self._event is None:
            flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
            self._event = checked(driver.cuEventCreate, flags)
        checked(driver.cuEventRecord, self._event, previous)
        checked(driver.cuStreamWaitEvent, stream, self._event, 0)


def _is_capturing(stream: int) -> bool:
    """Whether work on ``stream`` is recorded, not run."""
    if stream == 0:  # the default stream never is
        return False
    return bool(checked(driver.cuStreamIsCapturing, stream) != _NOT_CAPTURING)
