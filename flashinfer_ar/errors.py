"""Exceptions for the machine and the peers.

A wrong argument is a plain ``ValueError`` or ``TypeError``; everything that an argument cannot
explain (a build, a driver, another rank) derives from :class:`FlashInferARError`.
"""

from __future__ import annotations


class FlashInferARError(RuntimeError):
    """Base class of the errors below."""


class JitError(FlashInferARError):
    """A kernel could not be built: the message has the command, the log and the source path."""


class BootstrapError(FlashInferARError):
    """The group of ranks cannot work together: a peer was lost or did not answer in time."""


class SymmetricMemoryError(FlashInferARError):
    """Symmetric memory could not be created or shared; every rank raises the same text."""


class CudaError(FlashInferARError):
    """A CUDA driver call failed: the message has its name and code."""


class CallMismatchError(FlashInferARError):
    """Ranks made different calls; only ``FLASHINFER_AR_DEBUG=1`` finds that out at once."""


class CheckpointError(FlashInferARError):
    """A call between ``checkpoint_prepare`` and ``checkpoint_restore``."""


class AllReduceTimeoutError(FlashInferARError):
    """A kernel waited for a peer's data past ``FLASHINFER_AR_TIMEOUT_S``.

    The workspace that raised it stays unusable: its slots hold half-finished calls.
    """
