"""Peers of the side-by-side benchmark, built from the headers that flashinfer-python ships.

``build.libraries()`` compiles a small shim around each peer's unmodified header;
``FlashInferMnnvl``, ``TensorRtLlm`` and ``VllmCustom`` are ``benchmarks.contender.Contender``s
over those libraries, in bf16 and for 2, 4 or 8 ranks of one device. ``PeerError`` says in words
what is missing or went wrong.

An epsilon of ``EPSILON`` is what every fused call adds to the mean square.
"""

from benchmarks.peers.flashinfer_mnnvl import FlashInferMnnvl
from benchmarks.peers.shim import EPSILON, Harness
from benchmarks.peers.trtllm import TensorRtLlm
from benchmarks.peers.vllm import VllmCustom
from benchmarks.peers.wheel import PeerError

__all__ = ["EPSILON", "FlashInferMnnvl", "Harness", "PeerError", "TensorRtLlm", "VllmCustom"]
